"""The test data are what the other tests rely on: exact cases are exact, every used weight has a gradient, a difference is seen."""

import pytest
import torch

from tests.models import EXACT, GPT, SMOOTH_MLP, Case
from tests.reference import FP32_TOLERANCE, Named, Trace, backward, differences, momentum, named_differences, sgd, train, whole_gradients


def over_parts(case: Case, parameters: Named, step: int, parts: int) -> tuple[float, dict[str, torch.Tensor | None]]:
    """The loss and the gradients of a step, as the mean of those of `parts` ranks."""
    model = case.model()
    model.load_state_dict(parameters, strict=False)
    losses = [backward(model, case, case.batch(step).part(part, parts), parts) for part in range(parts)]
    gradients = {name: None if gradient is None else gradient / parts for name, gradient in whole_gradients(model).items()}
    return sum(losses) / parts, gradients


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_exact_cases_are_exact_at_every_step(case: Case) -> None:
    for make_optimizer in (sgd, momentum):
        trace = train(case.model(), case, make_optimizer=make_optimizer)
        for step in (1, 2):
            for parts in (2, 3, 4, 12):
                loss, gradients = over_parts(case, trace.parameters[step - 1], step, parts)
                assert loss == trace.losses[step]
                assert named_differences("gradient of", gradients, trace.gradients[step]) == []


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_every_used_parameter_has_a_gradient_at_every_step(case: Case) -> None:
    trace = train(case.model(), case)
    for gradients in trace.gradients:
        assert all(gradient.any() for gradient in gradients.values() if gradient is not None and gradient.numel())
    assert len(set(trace.losses)) == 3


@pytest.mark.parametrize("case", [GPT, SMOOTH_MLP], ids=str)
def test_a_small_wrong_factor_is_seen(case: Case) -> None:
    expected = train(case.model(), case)
    wrong = train(case.model(), case)
    assert differences([wrong], expected) == []
    name, gradient = next((name, gradient) for name, gradient in wrong.gradients[1].items() if gradient is not None)
    wrong.gradients[1][name] = gradient * (1 + 4 * FP32_TOLERANCE)
    assert [text.split(":")[1].strip() for text in differences([wrong], expected, FP32_TOLERANCE)] == [f"gradient of {name}"]


def test_a_zero_instead_of_no_gradient_is_seen() -> None:
    weight = torch.ones(2)
    expected = Trace([1.0], [{"w": None}], [{"w": weight}])
    zero = Trace([1.0], [{"w": torch.zeros(2)}], [{"w": weight}])
    assert differences([zero], expected) == ["rank 0, step 0: gradient of w: (2,) torch.float32 instead of None"]
    assert differences([Trace([float("nan")], [{"w": None}], [{"w": weight}])], expected) == ["step 0: mean loss nan instead of 1.0"]
