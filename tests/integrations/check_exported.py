"""Program without rein: compare the exported policies in some folders with recorded actions.

For each folder, prints the largest difference of the ONNX model and of the torch.export program.
"""

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class WithoutRein(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rein", "gymnasium"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, WithoutRein())

import onnxruntime  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1


def leaves(tree):
    return [x for part in tree.values() for x in leaves(part)] if isinstance(tree, dict) else [tree]


def difference(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return float((found.double() - expected.double()).abs().max())


def check(folder):
    steps, largest = torch.load(folder / "steps.pt"), [0.0, 0.0]
    session = onnxruntime.InferenceSession(folder / "policy.onnx", options)
    program = torch.export.load(folder / "policy.pt2").module()
    outputs = [output.name for output in session.get_outputs()]
    assert outputs[0].startswith("action")
    carries = None, None
    for step in steps:
        inputs, arguments = dict(step["inputs"]), [step["observation"]]
        if step["carry"] is not None:
            if step["begin"]:
                carries = torch.zeros(step["carry"]), torch.zeros(step["carry"])
            inputs["carry"] = carries[0]
            arguments.append(carries[1])
        names = [each.name for each in session.get_inputs()]
        assert names[0].startswith("observation") and set(names) == set(inputs)
        assert "carry" not in inputs or names[-1] == "carry"
        by_onnx = dict(zip(outputs, session.run(None, {k: x.numpy() for k, x in inputs.items()}), strict=True))
        by_program = program(*arguments)
        if step["carry"] is not None:
            by_program, carry = by_program
            carries = torch.from_numpy(by_onnx.pop("next_carry")), carry
        for name, found, expected in zip(by_onnx, leaves(by_program), leaves(step["action"]), strict=True):
            largest[0] = max(largest[0], difference(torch.from_numpy(by_onnx[name]), expected))
            largest[1] = max(largest[1], difference(found, expected))
    return largest


print(json.dumps({folder: check(Path(folder)) for folder in sys.argv[1:]}))
