"""The built-in text from which the scales of a quantized KV cache are calibrated. It mixes prose, figures, code, markup
and several scripts, because models' keys and values differ most between these."""

TEXT = """\
The lighthouse keeper wrote the same three lines every evening: the height of the tide, the direction of the wind, and \
the name of whichever ship had passed. In forty years nobody had asked to read them. When the harbour board finally \
sent a clerk, in the autumn of 1931, she found 14,612 entries in a hand that had grown smaller with every volume, as \
if the man had been trying to leave room for more weather than there was paper.

Q: What is 17 * 23, and how do you check it?
A: 17 * 23 = 391. Split it: 17 * 20 = 340 and 17 * 3 = 51; 340 + 51 = 391. Dividing back, 391 / 17 = 23.

| city | population (2020) | area, km² |
| --- | ---: | ---: |
| Zürich | 421,878 | 87.88 |
| 東京 | 13,960,236 | 2,194.07 |

def merge(left: list[int], right: list[int]) -> list[int]:
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i]); i += 1
        else:
            merged.append(right[j]); j += 1
    return merged + left[i:] + right[j:]

{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": [1, 2, 3]}}

<ul><li><a href="https://example.com/?q=kv%20cache">A link</a></li></ul>

Le train de 8 h 42 est parti sans nous. Der nächste fährt erst um zehn, und es regnet. 我们在车站等了一个小时。 \
Мы пили чай и молчали. ¿Y ahora qué hacemos? — Nothing, she said; we wait.

Photosynthesis stores the energy of light in sugar. Chlorophyll absorbs red and blue; the reaction splits water, \
releases oxygen and drives the synthesis of ATP and NADPH, which the Calvin cycle then spends on fixing carbon dioxide.
"""
