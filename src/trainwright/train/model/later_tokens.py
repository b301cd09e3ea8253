"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 s2.2): small modules behind the model, each of which
predicts one token further than what stands before it.

Module k reads, at each position i, the hidden state of module k - 1 (of the last layer, for the first) and the
embedding of token i + k. Both are normed, joined by a projection, and go through a layer like the model's last;
what comes out, normed, goes to the model's own head, which then predicts token i + k + 1. Attention is causal here
too: at no position does a module see more than the tokens up to i + k.

At the last k positions of a sequence token i + k isn't there. Their place is held by token 0, no earlier position
reads it, and they have no target. Tokens and targets are shifted in whole sequences, before ranks take their
positions of them (`data.Batch`). These modules are no layers of a stage: recomputation leaves them as they are.
Dropout counts their layers on behind the model's last.
"""

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.spec.model import ModelSpec
from trainwright.train.model.layers import Layer
from trainwright.train.model.linear import Linear
from trainwright.train.model.norm import Norm
from trainwright.train.model.rotary import Rotary


class LaterToken(nn.Module):
    """One module. Embedding and head are the model's."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.hidden_norm = Norm(spec, spec.d_model)
        self.token_norm = Norm(spec, spec.d_model)
        self.join = Linear(2 * spec.d_model, spec.d_model, bias=False)
        self.layer = Layer(spec, spec.layers[-1])
        self.norm = Norm(spec, spec.d_model)

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        token_BSD: torch.Tensor,
        rotary: Rotary | None,
        documents_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden state for the next module, and the same normed for the head."""
        both = torch.cat((self.hidden_norm(hidden_BSD), self.token_norm(token_BSD)), dim=-1)
        hidden_BSD = self.layer(self.join(both), rotary, documents_BS)
        return hidden_BSD, self.norm(hidden_BSD)


def shifted(tokens_BS: torch.Tensor, by: int, filler: int) -> torch.Tensor:
    """At each position the token that stands `by` further on; `filler` where there is none."""
    by = min(by, tokens_BS.shape[1])
    return F.pad(tokens_BS[:, by:], (0, by), value=filler)
