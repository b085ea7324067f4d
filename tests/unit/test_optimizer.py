"""Optimizers against torch and against a plain restatement of BertAdam."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.core.typed import read_typed
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer, make_schedule, rates
from tests.refusals import refuses

pytestmark = pytest.mark.slow

STEPS = 20
SHAPES = {"dense/kernel": (4, 3), "dense/bias": (3,), "norm/scale": (3,), "head/kernel": (3, 2)}


def read_options(section) -> OptimizerOptions:
    return read_typed(OptimizerOptions, section, "train.optimizer")


def start_and_gradients(shapes=SHAPES, count=5):
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    # Large and small gradients, so that clipping acts on some.
    scales = [3.0, 0.1, 1.0, 0.01, 2.0][:count]
    grads = [
        {name: (s * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
        for s in scales
    ]
    return start, grads


def nest(named):
    nested = {}
    for name, value in named.items():
        section, leaf = name.split("/")
        nested.setdefault(section, {})[leaf] = (
            value if isinstance(value, nnx.Param) else np.asarray(value)
        )
    return nested


def optimizer_of(section):
    return make_optimizer(read_options(section), STEPS)[0]


def after(optimizer, params, grads):
    """Parameters and the optimizer's state after the gradients, in one program."""

    def step(carried, grad):
        params, state = carried
        updates, state = optimizer.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, grads):
        return jax.lax.scan(step, (params, optimizer.init(params)), grads)[0]

    return run(params, jax.tree.map(lambda *each: np.stack(each), *grads))


def updated(section, start, grads):
    """As `after`, of named arrays."""
    params, _ = after(optimizer_of(section), nest(start), [nest(grad) for grad in grads])
    return {name: np.asarray(value) for name, value in flatten_named(params).items()}


def assert_close(ours, theirs, atol=2e-6):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=atol, rtol=1e-5, err_msg=name)


def stacked(value, *names: str | None) -> nnx.Param:
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


def test_adafactor_is_optax_own_layer_by_layer():
    """A stack of matrices that are factored, one of vectors, a small matrix, and a frozen one."""
    rng, layers, rate = np.random.default_rng(3), 3, 0.02
    shapes = {"wide/kernel": (130, 160), "tall/kernel": (160, 130), "small/scale": (5,)}
    axes = {
        "wide/kernel": ("embed", "mlp"),
        "tall/kernel": ("mlp", "embed"),
        "small/scale": (None,),
    }
    alone = {"table/table": (200, 128), "head/bias": (7,)}
    make = {name: (layers, *shape) for name, shape in shapes.items()} | alone

    def draw(scale: float) -> dict[str, np.ndarray]:
        return {n: (scale * rng.normal(size=s)).astype(np.float32) for n, s in make.items()}

    def params_of(named):
        return nest({
            name: stacked(x, "layers", *axes[name]) if name in shapes
            else stacked(x, *("vocab", "embed")[: x.ndim])
            for name, x in named.items()
        })  # fmt: skip

    def split(named):
        own = {name: x for name, x in named.items() if name in alone}
        for name in shapes:
            own |= {f"{name}/{number}": named[name][number] for number in range(layers)}
        return own

    start, grads = draw(0.4), [draw(scale) for scale in (2.0, 0.01, 1.0)]
    section = {
        "name": "adafactor", "learning_rate": rate, "schedule": "constant", "warmup": 0.0,
        "trainable": r"^(?!head/)",
    }  # fmt: skip
    params, state = after(
        optimizer_of(section), params_of(start), [params_of(grad) for grad in grads]
    )
    want, _ = after(optax.adafactor(rate), split(start), [split(grad) for grad in grads])
    got = split({name: np.asarray(x) for name, x in flatten_named(params).items()})
    np.testing.assert_array_equal(got.pop("head/bias"), start["head/bias"])
    want.pop("head/bias")
    assert_close(got, want)

    named = {name: x for name, x in flatten_named(state).items() if x.size > layers}
    kept = sum(x.size for x in named.values())
    assert kept == layers * 2 * (130 + 160) + layers * 5 + 200 + 128
    sharded = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    found = {
        (x.get_value().shape, x.get_metadata()["out_sharding"])
        for x in sharded
        if isinstance(x, nnx.Variable) and jax.tree.leaves(x)
    }
    assert ((layers, 130), ("layers", "embed")) in found
    assert ((layers, 160), ("layers", "mlp")) in found
    assert ((200,), ("vocab",)) in found
    assert ((layers, 5), ("layers", None)) in found


def test_a_filter_trains_its_parameters_alone_and_keeps_no_state_of_the_others():
    """The trained ones move as if there were no others, also under the gradient's norm."""
    start, grads = start_and_gradients()
    section = {"name": "adamw", "clip_norm": 0.5, "trainable": r"^dense/"}
    got = updated(section, start, grads)
    alone = {name: x for name, x in start.items() if name.startswith("dense/")}
    their_grads = [{name: grad[name] for name in alone} for grad in grads]
    want = updated({"name": "adamw", "clip_norm": 0.5}, alone, their_grads)
    for name, x in got.items():
        np.testing.assert_array_equal(x, want.get(name, start[name]), err_msg=name)
    assert any((got[name] != start[name]).any() for name in alone)
    shapes = jax.eval_shape(optimizer_of(section).init, nest(start))
    assert not [name for name in flatten_named(shapes) if "head" in name or "norm/" in name]


def test_groups_are_clipped_apart_as_in_torch():
    """Prophet stage1/utils/optim.py: each group's norm by itself, and each at its own rate."""
    import torch

    start, grads = start_and_gradients()
    params = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start.items()}
    inner = [params[name] for name in params if name.startswith("dense/")]
    outer = [params[name] for name in params if not name.startswith("dense/")]
    groups = [{"params": outer, "lr": 0.05}, {"params": inner, "lr": 0.005}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98), eps=1e-6)
    for grad in grads:
        for key, value in grad.items():
            params[key].grad = torch.tensor(value)
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
    section = {
        "name": "adam", "learning_rate": 0.05, "schedule": "stairs", "levels": ((0, 1.0),),
        "b2": 0.98, "eps": 1e-6, "clip_norm": 1.0, "clip_apart": True,
        "multipliers": ((r"^dense/", 0.1),),
    }  # fmt: skip
    theirs = {name: value.detach().numpy() for name, value in params.items()}
    assert_close(updated(section, start, grads), theirs)


@pytest.mark.parametrize("section", [{"schedule": "stairs"}, {"levels": ((0, 1.0),)},
                                     {"schedule": "stairs", "levels": ((5, 1.0),)}])  # fmt: skip
def test_stairs_that_cannot_be(section):
    refuses("pairs of first step and factor, from step 0 on", read_options, section)


def test_filters_that_cannot_be():
    with pytest.raises(UserError, match=r"trainable: 'nothing' matches no parameter"):
        updated({"name": "adamw", "trainable": "nothing"}, *start_and_gradients())
    refuses(r"'\(' is not a regular expression", read_options, {"trainable": "("})
    refuses("bert_adam trains all", read_options, {"name": "bert_adam", "trainable": "x"})


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_and_adamw_equal_torch(name):
    import torch

    start, grads = start_and_gradients()
    params = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start.items()}
    rest = {"lr": 0.05, "betas": (0.9, 0.98), "eps": 1e-6}
    if name == "adamw":
        decayed = [params["dense/kernel"], params["head/kernel"]]
        others = [params["dense/bias"], params["norm/scale"]]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, **rest)
    else:
        optimizer = torch.optim.Adam(params.values(), **rest)
    for grad in grads:
        for key, value in grad.items():
            params[key].grad = torch.tensor(value)
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
    section = {"name": name, "learning_rate": 0.05, "schedule": "constant", "warmup": 0}
    section |= {"b2": 0.98, "eps": 1e-6, "clip_norm": 1.0}
    if name == "adamw":
        section["weight_decay"] = 0.1
    ours = updated(section, start, grads)
    assert_close(ours, {key: value.detach().numpy() for key, value in params.items()})


def bert_adam(start, grads, rate, steps, warmup, decayed, max_norm=1.0):
    """pytorch_pretrained_bert/optimization.py restated in float64."""
    params = {name: value.astype(np.float64) for name, value in start.items()}
    m = dict.fromkeys(start, 0.0)
    v = dict.fromkeys(start, 0.0)
    for step, grad in enumerate(grads):
        x = step / steps
        lr = rate * (x / warmup if x < warmup else (1 - x) / (1 - warmup))
        for name, value in grad.items():
            g = value.astype(np.float64)
            g = g * min(1.0, max_norm / (np.sqrt((g**2).sum()) + 1e-6))
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            update = m[name] / (np.sqrt(v[name]) + 1e-6)
            if name in decayed:
                update = update + 0.01 * params[name]
            params[name] = params[name] - lr * update
    return params


def test_bert_adam_equals_its_restatement():
    start, grads = start_and_gradients()
    decayed = {"dense/kernel", "head/kernel"}
    theirs = bert_adam(start, grads, 0.05, STEPS, 0.1, decayed)
    section = {"name": "bert_adam", "learning_rate": 0.05}
    assert_close(updated(section, start, grads), theirs)


def test_bert_adam_clips_each_layer_of_a_stack_on_its_own():
    layers = {f"layer{i}/kernel": (3, 2) for i in range(4)}
    start, grads = start_and_gradients(layers)
    for grad in grads:  # one layer far above the others: clipping the stack would shrink them
        grad["layer2/kernel"] *= 50
    theirs = bert_adam(start, grads, 0.05, STEPS, 0.1, set(layers))

    def stack(named):
        value = np.stack([named[name] for name in layers])
        names = ("layers", "embed", "mlp")
        return nnx.State({"kernel": nnx.Param(value, out_sharding=names, eager_sharding=False)})

    section = {"name": "bert_adam", "learning_rate": 0.05}
    params, _ = after(optimizer_of(section), stack(start), [stack(grad) for grad in grads])
    kernels = np.asarray(params["kernel"][...])
    for i, name in enumerate(layers):
        np.testing.assert_allclose(kernels[i], theirs[name], atol=2e-6, err_msg=name)


def torch_bert_adam(start, losses, rate, steps, warmup):
    """The same in torch, where a loss that does not read a parameter leaves its gradient None.

    zero_grad writes zeros, as that of torch 1.1 did, with which VLP was published.
    """
    import torch

    params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start.items()}
    state = {}
    for step, weights in enumerate(losses):
        sum((torch.tensor(w) * params[name]).sum() for name, w in weights.items()).backward()
        x = step / steps
        lr = rate * (x / warmup if x < warmup else (1 - x) / (1 - warmup))
        with torch.no_grad():
            for name, p in params.items():
                if p.grad is None:
                    continue
                m, v = state.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
                torch.nn.utils.clip_grad_norm_(p, 1.0)
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p -= lr * (m / (v.sqrt() + 1e-6) + 0.01 * p)
        for p in params.values():
            if p.grad is not None:
                p.grad.zero_()
    return {name: p.detach().numpy() for name, p in params.items()}


def test_bert_adam_leaves_a_parameter_that_no_loss_has_reached():
    """`never` has no gradient, `late` from step 2 on, `once` in step 1 alone; also in a stack."""
    shapes = {f"{name}/kernel": (3, 2) for name in ("always", "never", "late", "once")}
    start, grads = start_and_gradients(shapes)
    reached = [("always", "once"), ("always",), ("always", "late"), ("always",), ("late",)]
    losses = [
        {f"{name}/kernel": grad[f"{name}/kernel"] for name in names}
        for grad, names in zip(grads, [reached[1], reached[0], *reached[2:]], strict=True)
    ]
    theirs = torch_bert_adam(start, losses, 0.05, STEPS, 0.1)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    section = {"name": "bert_adam", "learning_rate": 0.05}
    ours = updated(section, start, [{**zeros, **loss} for loss in losses])
    assert_close(ours, theirs)
    np.testing.assert_array_equal(ours["never/kernel"], start["never/kernel"])
    assert (ours["once/kernel"] != start["once/kernel"]).all()

    def stack(named):
        value = np.stack([named[name] for name in shapes])
        names = ("layers", "embed", "mlp")
        return nnx.State({"kernel": nnx.Param(value, out_sharding=names, eager_sharding=False)})

    params, _ = after(
        optimizer_of(section), stack(start), [stack({**zeros, **loss}) for loss in losses]
    )
    kernels = np.asarray(params["kernel"][...])
    for i, name in enumerate(shapes):
        np.testing.assert_allclose(kernels[i], theirs[name], atol=2e-6, err_msg=name)


def muon_grads(layers, rng):
    """Gradients of a stack of `layers` tall matrices, wide experts in pairs, and two others."""
    shapes = {
        "tall/kernel": (layers, 12, 5), "experts/kernels": (layers, 2, 4, 9),
        "layer/scale": (layers, 5), "tokens/table": (7, 5),
    }  # fmt: skip
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


MUON_AXES = {
    "tall/kernel": ("layers", "mlp", "embed"),
    "experts/kernels": ("layers", "experts", "embed", "mlp"),
    "layer/scale": ("layers", "embed"),
    "tokens/table": ("vocab", "embed"),
}


@pytest.mark.parametrize(("rms", "adjusted"), [(0.2, "match_rms_adamw"), (None, "original")])
def test_muon_is_torchs_own_for_every_matrix_of_a_stack(rms, adjusted, monkeypatch):
    """Its Newton-Schulz steps in float32, where torch rounds to bfloat16; AdamW for the rest."""
    import torch

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())  # it divides in place
    rng, layers, rate, decay = np.random.default_rng(5), 3, 0.05, 0.1
    start, grads = muon_grads(layers, rng), muon_grads(layers, rng)

    def matrices(named):
        kernels = {f"tall/{n}": x for n, x in enumerate(named["tall/kernel"])}
        return kernels | {
            f"experts/{n}/{m}": x
            for n, pair in enumerate(named["experts/kernels"])
            for m, x in enumerate(pair)
        }

    def as_torch(named, turned):
        return [torch.nn.Parameter(torch.tensor(x.T if turned else x)) for x in named.values()]

    others = [{name: x[name] for name in ("layer/scale", "tokens/table")} for x in (start, grads)]
    of_muon, of_adam = as_torch(matrices(start), True), as_torch(others[0], False)
    rest = {"lr": rate, "weight_decay": decay}
    optimizers = [
        torch.optim.Muon(of_muon, adjust_lr_fn=adjusted, **rest),
        torch.optim.AdamW([{"params": of_adam[:1], "weight_decay": 0.0},
                           {"params": of_adam[1:]}], **rest),
    ]  # fmt: skip
    their_grads = as_torch(matrices(grads), True) + as_torch(others[1], False)
    for parameter, gradient in zip(of_muon + of_adam, their_grads, strict=True):
        parameter.grad = gradient.detach()
    for optimizer in optimizers:
        optimizer.step()

    def params_of(named):
        return nest({name: stacked(x, *MUON_AXES[name]) for name, x in named.items()})

    section = {
        "name": "muon", "learning_rate": rate, "schedule": "constant", "warmup": 0.0,
        "weight_decay": decay, "muon_rms": rms,
    }  # fmt: skip
    with jax.default_matmul_precision("highest"):
        params, state = after(optimizer_of(section), params_of(start), [params_of(grads)])
    got = {name: np.asarray(x) for name, x in flatten_named(params).items()}
    want = [x.detach().numpy().T for x in of_muon] + [x.detach().numpy() for x in of_adam]
    ours = [*matrices(got).values(), got["layer/scale"], got["tokens/table"]]
    for mine, theirs in zip(ours, want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    # One moment of a matrix, two of the rest.
    sizes = {name: np.asarray(x).size for name, x in flatten_named(state).items()}
    assert sum(size for name, size in sizes.items() if "tall" in name) == start["tall/kernel"].size
    assert sum(size for name, size in sizes.items() if "table" in name) == 2 * 35


def test_muon_without_matrices_of_layers():
    with pytest.raises(UserError, match="no matrices of stacked layers; set it to adamw"):
        updated({"name": "muon"}, *start_and_gradients())


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_wsd_is_transformers_own(shape):
    import torch
    import transformers

    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kind = "1-sqrt" if shape == "sqrt" else shape
    (level,) = transformers.get_wsd_schedule(sgd, 10, 30, 100, decay_type=kind).lr_lambdas
    section = {
        "learning_rate": 2.0, "schedule": "wsd", "warmup": 0.1, "decay_shape": shape,
        "final_fraction": 0.0,
    }  # fmt: skip
    for decay in (0.3, 30):
        got = rates(read_options(section | {"decay": decay}), 100, 101)
        np.testing.assert_allclose(got, [2 * level(step) for step in range(101)], atol=2e-6)
    ended = rates(read_options(section | {"decay": 0.3, "final_fraction": 0.25}), 100, 101)
    np.testing.assert_allclose(ended[[70, 100]], [2, 0.5], atol=1e-6)
    with pytest.raises(UserError, match=r"warmup=0.1 and decay=95 take more than the 100 steps"):
        rates(read_options(section | {"decay": 95}), 100, 1)


def test_inverse_sqrt_is_transformers_own_whatever_the_number_of_steps():
    import torch
    import transformers

    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    (level,) = transformers.get_inverse_sqrt_schedule(sgd, 10).lr_lambdas
    options = read_options({"learning_rate": 2.0, "schedule": "inverse_sqrt", "warmup": 10})
    for steps in (100, 1000):
        got = rates(options, steps, 101)
        np.testing.assert_allclose(got, [2 * level(step) for step in range(101)], atol=2e-6)
    with pytest.raises(UserError, match="inverse_sqrt falls from the last step of the warm-up"):
        read_options({"schedule": "inverse_sqrt", "warmup": 0})


def test_schedules_warm_up_and_end_where_they_should():
    def rates(**section):
        schedule = make_schedule(read_options({"learning_rate": 2.0, **section}), 100)
        return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(101)))

    linear = rates(schedule="linear", warmup=0.1)
    np.testing.assert_allclose(linear[[0, 5, 10, 55, 100]], [0, 1, 2, 1, 0], atol=1e-6)
    np.testing.assert_allclose(rates(schedule="linear", warmup=10), linear, atol=1e-6)
    cosine = rates(schedule="cosine", warmup=0, final_fraction=0.1)
    theirs = optax.cosine_decay_schedule(2.0, 100, alpha=0.1)
    np.testing.assert_allclose(cosine, jax.jit(jax.vmap(theirs))(np.arange(101)), atol=1e-5)
    constant = rates(schedule="constant", warmup=4)
    np.testing.assert_allclose(constant[[0, 1, 4, 100]], [0, 0.5, 2, 2], atol=1e-6)
    assert np.isfinite(rates(warmup=500)).all()  # a warm-up longer than the run


def test_multipliers_scale_the_whole_update_of_the_first_match():
    start, grads = start_and_gradients()
    section = {"name": "adamw", "learning_rate": 0.01, "schedule": "constant", "warmup": 0}
    plain = updated(section, start, grads[:1])
    scaled = updated(
        {**section, "multipliers": (("^head/", 10.0), ("kernel", 0.0))}, start, grads[:1]
    )
    np.testing.assert_allclose(
        scaled["head/kernel"] - start["head/kernel"],
        10 * (plain["head/kernel"] - start["head/kernel"]),
        rtol=1e-3,
    )
    np.testing.assert_array_equal(scaled["dense/kernel"], start["dense/kernel"])
    np.testing.assert_array_equal(scaled["dense/bias"], plain["dense/bias"])
    with pytest.raises(UserError, match=r"'^haed' matches no parameter".replace("^", r"\^")):
        updated({**section, "multipliers": (("^haed", 10.0),)}, start, grads[:1])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "adamww"}, r"train\.optimizer\.name='adamww': one of adam, .*mean 'adamw'"),
        ({"schedule": "cosin"}, r"train\.optimizer\.schedule='cosin': .*mean 'cosine'"),
        ({"lr": 1e-3}, r"train\.optimizer\.lr: unknown; the known ones are b1, b2"),
        ({"name": "adam", "weight_decay": 0.1}, r"adam has no weight decay"),
        ({"learning_rate": 0.0}, r"learning_rate must be above 0"),
        ({"b1": -0.1}, r"train\.optimizer\.b1=-0\.1: a number from 0 to less than 1 was expected"),
        ({"b2": 1.0}, r"train\.optimizer\.b2=1\.0: a number from 0 to less than 1 was expected"),
        ({"clip_norm": -1.0}, r"train\.optimizer\.clip_norm=-1\.0: a number above 0 was expected"),
        ({"clip_norm": float("nan")}, r"train\.optimizer\.clip_norm=nan: a number above 0 was"),
        ({"eps": 0.0}, r"train\.optimizer\.eps=0\.0: a number above 0 was expected"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1: a number not below 0 was expected"),
    ],
)
def test_bad_sections_are_named(section, message):
    refuses(message, read_options, section)


@pytest.mark.parametrize("schedule", ["cosine", "stairs"])
def test_rates_of_the_first_steps_are_one_program(schedule):
    levels = {"levels": ((0, 1.0), (3, 0.5)), "warmup": 0} if schedule == "stairs" else {}
    options = OptimizerOptions(schedule=schedule, **levels)
    programs = []

    def count(event, seconds, **facts):
        if event.endswith("backend_compile_duration"):
            programs.append(facts)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        found = rates(options, 11, 7)  # sizes that no other test has
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(programs) == 1
    rate = jax.jit(make_schedule(options, 11))
    one_by_one = [rate(step) for step in range(7)]
    np.testing.assert_allclose(found, one_by_one, rtol=1e-6)
    if schedule == "stairs":
        falls = np.array([1.0] * 3 + [0.5] * 4)  # from the step of a level on
        np.testing.assert_allclose(found, options.learning_rate * falls, rtol=1e-6)
