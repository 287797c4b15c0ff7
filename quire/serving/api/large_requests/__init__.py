"""Work on what is large in requests, in processes of low priority: reading bodies, rendering templates, encoding texts.

In the API process it would hold the interpreter's lock or a core that the model needs, and keep every stream waiting.
"""
