"""Where the FSDP2 engine puts itself on a world of ranks. Light: no torch."""

from __future__ import annotations

from core.errors import Refused
from core.manifest import Limits, ModelFacts, Plan
from core.mesh import MeshLayout
from manymesh_fsdp.config import FsdpConfig

AXIS = "fsdp"
OUTPUTS = frozenset({"log_probs", "entropy", "top_log_probs"})
# Layers whose tokens see each other through attention alone, which position_ids keep apart. State-space and
# convolution layers carry a state over a packed row's borders.
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def plan(config: FsdpConfig, world_size: int, model: ModelFacts | None = None) -> Plan:
    """One axis, `fsdp`: every rank has its own rows, and its output is collected.

    Raises:
        Refused: no rank, flash attention in fp32, training of 16-bit parameters, or packing of a model whose layers
            would leak between rows.
    """
    if world_size < 1:
        raise Refused("an engine needs at least one rank", have=world_size, want="a world size of 1 or more")
    if config.trainable and config.dtype in ("bfloat16", "float16"):
        raise Refused(
            "the optimizer works on the parameters, and in 16 bits a step of a small learning rate changes none",
            have=f"trainable, dtype={config.dtype!r}",
            want="float32 parameters; forward and backward may run in 16 bits",
            mend=f"set dtype='float32', compute_dtype={config.dtype!r}",
        )
    compute = config.compute_dtype or config.dtype
    if config.flash_attention and compute == "float32":
        raise Refused(
            "flash attention does not compute in float32",
            have=f"attn_implementation={config.attn_implementation!r}, compute dtype {compute}",
            want="bfloat16 or float16",
            mend="set compute_dtype='bfloat16'",
        )
    layer_types = set(model.config.get("layer_types") or ()) if model else set()
    if config.packed and not layer_types <= PACKABLE_LAYERS:
        raise Refused(
            "rows packed into one would leak into each other in this model",
            have=f"layers of type {sorted(layer_types - PACKABLE_LAYERS)}",
            want=f"only {sorted(PACKABLE_LAYERS)}",
            where=model.path if model else "",
            mend="set packing=False",
        )
    layout = MeshLayout.of(fsdp=world_size)
    return Plan(layout, layout.route((AXIS,)), Limits(packed=config.packed, outputs=OUTPUTS))
