"""Storages: the unique names of bytes, and where the scale of a copy is."""

from typing import Any

from llmq.tensor import Ref, changed, scale_shape


def storage_name(ref: Ref) -> str:
    """Unique name of the bytes of a Ref."""
    if ref.space == "activation":
        # A second life has bytes of its own: the first one's may be given to others in between.
        name = ref.name + ("~" if ref.again else "") + ("@host" if ref.home == "host" else "")
    elif ref.form is None and ref.origin.value_in is not None:
        return f"{ref.origin.value_in}:{ref.name}"
    else:
        name = f"{ref.space}:{ref.name}"
    return f"{name}@{ref.form.key}" if ref.form else name


def scale_name(ref: Ref) -> str | None:
    """Storage, or cell, of the scales that a copy is read with; None for a plain form."""
    if ref.form is None or ref.form.scaling is None:
        return None
    return storage_name(scale_ref(ref))


def scale_ref(ref: Ref) -> Ref:
    """The scales of a scaled copy: its own, a cell that outlives the program, or a slot beside the value's slot."""
    assert ref.form is not None
    if ref.form.owns_scales:
        return own_scales(ref)
    if ref.space == "activation" and ref.origin.cell is None and not ref.form.has_cell:
        # A measured scale of an intermediate is of no use after it, so it is a slot, too.
        return Ref(f"{ref.name}@scale/{ref.form.dtype}", "activation", (1,), "fp32", ref.layer)
    return Ref(scale_cell(ref, ref.form.dtype), "scale", (1,), "fp32")


def scale_cell(ref: Ref, dtype: str) -> str:
    """Name of the persistent scale of a tensor's copies in `dtype`: one for all programs and micro-steps."""
    # Without the micro-step, phase and chunk: all of them quantize by one history of amax.
    name = ref.name.split("/", 1)[-1].split("#")[0] if ref.space == "activation" else ref.name
    return f"{ref.origin.cell or name}@{dtype}"


def own_scales(ref: Ref) -> Ref:
    """The scales of a copy that owns them: one more tensor, which lives as long as the copy's bytes."""
    assert ref.form is not None and ref.form.owns_scales
    name, shape = f"{ref.name}@scale/{ref.form.key}", scale_shape(ref.whole, ref.form)
    about: dict[str, Any] = {"name": name, "shape": shape, "dtype": ref.form.scales.dtype}
    return changed(ref, **about, form=None, view=None, origin=changed(ref.origin, value_in=None, held=None))


def known_scale(ref: Ref) -> Ref | None:
    """The scale of a copy that is the value's own, but is known before the program runs: that of a frozen weight, or of
    one whose copies are made for each use."""
    is_weight = ref.origin.is_remade or (ref.origin.held is not None and ref.origin.cell is not None)
    is_known = is_weight and ref.form is not None and ref.form.is_measured
    return scale_ref(ref) if is_known else None
