"""Context parallelism: the ranks of a cp group share the positions of every sequence (`parallel/positions.py`).

All of a layer but the attention core works on each position by itself, so a rank computes its own positions and
only the core must see the others'. `Recipe.cp_method` says how:

    all_gather  keys and values of all ranks are gathered at once (Llama 3, arXiv:2407.21783 s3.3.2)
    ring        they are passed round, beside the compute of those that are here (arXiv:2310.01889)
    all_to_all  heads are exchanged for positions: a rank has whole sequences of some heads (arXiv:2309.14509)

Gradients of parameters are sums over positions, so over cp as over dp: the data-parallel forms add them up over
both (`Mesh.dp_cp`), and shard over both what they shard.
"""

from functools import partial

from trainwright.spec.recipe import Recipe
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.exchanged import exchanged
from trainwright.train.parallel.positions import Context, positions_of
from trainwright.train.parallel.travelling import travelling


def apply_context_parallel(piece: Transformer, context: Context, recipe: Recipe) -> None:
    """Let the attention cores of a piece see the other ranks' positions, in place. Recomputation is applied
    before: heads are exchanged around a core that is recomputed, so that they needn't be again."""
    held = positions_of(recipe, context.size, context.rank)
    for knows_positions in (piece.rotary, piece.local_rotary, piece.positions):
        if knows_positions is not None:
            knows_positions.held = held
    is_recomputed = recipe.recompute == "selective" and "attention" in recipe.recompute_ops
    for number, layer in piece.numbered_layers():
        attention = layer.attention
        if recipe.cp_method == "all_to_all":
            attention.core = partial(exchanged, context, attention.core)
        else:
            # Layers that predict later tokens are recomputed in no part (`model/later_tokens.py`).
            again = is_recomputed and number < piece.spec.num_layers
            attention.core = partial(travelling, context, recipe.cp_method, again)
