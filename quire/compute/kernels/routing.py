"""How a router sends tokens to experts, as plain data without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]
"""How logits become scores of experts.

- `softmax`: by a softmax over all experts (Shazeer et al. 2017). A softmax over the chosen ones alone, as gpt-oss and
  Granite have it, is this one renormalised.
- `sigmoid`: one by one (DeepSeek-V3, section 2.1.2).
- `sqrtsoftplus`: one by one, the root of softplus.
- `sparsemixer`: expert by expert, as the best one's share among experts whose logits are near its own (Liu et al. 2023,
  SparseMixer).
"""


@dataclass(frozen=True)
class Routing:
    """How a router sends tokens to experts.

    Attributes:
        chosen: How many experts each token goes to.
        renormalise: Whether the weights of the chosen experts are scaled to the sum 1.
        scoring: How logits become scores, which are the weights of experts.
        scale: Factor of the weights, after they are renormalised.
        epsilon: Added to the sum that weights are divided by.
        groups: Number of groups of neighbouring experts.
        kept_groups: How many groups' experts each token may go to.
        of_best_two: Whether a group's score is the sum of its best two; otherwise, it is its best.
        cap: Bound c of logits, c · tanh(x / c); None: no bound.
        margin: Of `sparsemixer`, twice this is how far a logit may be from the best one, beside the larger of both.
        correction: Whether a learned number is added to each expert's score for the choice, but not for the weight.
        bias: Whether the router's product has a bias.
        fp32: What of the product is fp32 in any model: the logits (`sums`), or the weight as well (`weight`).
        scaled: Whether a learned factor of each expert multiplies its weights, after all else.
        on_input: Whether weights multiply the experts' input in place of their output; `chosen` is 1.
    """

    chosen: int
    renormalise: bool = False
    scoring: Scoring = "softmax"
    scale: float = 1.0
    epsilon: float = 0.0
    groups: int = 1
    kept_groups: int = 1
    of_best_two: bool = False
    cap: float | None = None
    margin: float = 0.0
    correction: bool = False
    bias: bool = False
    on_input: bool = False
    scaled: bool = False
    fp32: Literal["", "sums", "weight"] = ""

    @property
    def is_softmax(self) -> bool:
        """Whether weights are those of a softmax, and the likeliest experts are chosen."""
        return (
            self.scoring == "softmax"
            and not self.correction
            and self.groups == self.kept_groups
            and self.scale == 1.0
            and self.cap is None
        )
