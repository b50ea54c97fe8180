"""One call through every API, form and client, whose results must have the same bits."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import tritonclient.http as triton

import convgrad
from tests.app import graph, oip
from tests.app.samples import FRAMES, JSON, NPY, SSE, Array, document, post, read, read_events, read_tensor
from tests.live import LiveService
from tests.problems import Case

__all__ = ["FORMS", "command", "everywhere"]

FORMS = (JSON, NPY, SSE, FRAMES)
ENCODED = {"base64": "str", "list": "list", "npy": "npy"}


def everywhere(service: LiveService, case: Case, inputs: dict[str, Array], **options: Any) -> dict[str, Array]:
    """Return the result of a case by each API, form of a reply and client."""
    attributes, output = case.attributes(), case.output_name
    parameters, path = attributes | options, f"/v1/ops/{case.op}"
    with (
        httpx.Client(base_url=service.url, timeout=60.0) as http,
        convgrad.Client(service.url) as client,
        triton.InferenceServerClient(service.url.removeprefix("http://")) as inference,
    ):
        found = {f"multipart to {accept}": read(post(http, case, inputs, accept, **options)) for accept in FORMS}
        for form, encoding in (("base64", "list"), ("npy", "base64"), ("list", "npy")):
            sent = document(case, inputs, as_npy=form == "npy", as_numbers=form == "list", encoding=encoding, **options)
            call = {"jsonrpc": "2.0", "id": 1, "method": case.op, "params": sent}
            answer = http.post("/rpc", json=call).json()
            assert "result" in answer, answer["error"]
            replies = {form: http.post(path, json=sent).json(), f"rpc, {form}": answer["result"]}
            for name, tensor in ((name, reply["outputs"][output]) for name, reply in replies.items()):
                assert ("npy" if "npy" in tensor else type(tensor["data"]).__name__) == ENCODED[encoding]
                found[f"{name} to {encoding}"] = read_tensor(tensor)
        found["rpc to events"] = read_events(http.post("/rpc", json=call, headers={"accept": SSE}))
        wanted = [triton.InferRequestedOutput(output, binary_data=False)]
        binary = oip.triton_inputs(case, inputs)
        found["binary"] = inference.infer(case.op, binary, parameters=parameters).as_numpy(output)
        if case.dtype != "bf16":  # tritonclient itself rejects it in JSON
            numbers = oip.triton_inputs(case, inputs, binary=False)
            inferred = inference.infer(case.op, numbers, outputs=wanted, parameters=parameters)
            found["numbers"] = inferred.as_numpy(output)
        found["numbers by hand"] = oip.read(oip.post_json(http, case, inputs, parameters=parameters), case.dtype)
        found["client"] = client.run(case.op, inputs, attributes, **options)
        with client.stream(case.op, inputs, attributes, **options) as stream:
            found["client's stream"] = stream.result()
        if case.dtype != "f64":
            by_id = dict(enumerate(inputs.values()))
            (found["graph"],) = client.run_graph(graph.of_case(case), by_id, **options).values()
    return found


def command(case: Case, inputs: dict[str, Array]) -> list[str]:
    """Write the inputs of a case to the working folder; return the arguments that `convgrad run` and others take."""
    given = [case.op]
    for name, array in inputs.items():
        np.save(f"{name}.npy", array)
        given += [f"--{name.replace('_', '-')}", f"{name}.npy"]
    for name, value in case.attributes().items():
        given += ["--attr", f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"]
    return given
