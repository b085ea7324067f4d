"""What the YAML files of launch/ may hold: the parts of Kubernetes', JobSet's, KubeRay's and
SkyPilot's published schemas that they use, as JSON Schema. A key that is not here is a mistake."""

from typing import Any

_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def _map(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value}


_METADATA = _object(("name",), name=_NAME, annotations=_map(_TEXT))
_ENV = {
    "oneOf": [
        _object(("name", "value"), name=_TEXT, value=_TEXT),
        _object(
            ("name", "valueFrom"),
            name=_TEXT,
            valueFrom=_object(("fieldRef",), fieldRef=_object(("fieldPath",), fieldPath=_TEXT)),
        ),
    ]
}
_CONTAINER = _object(
    ("name", "image"),
    name=_NAME,
    image=_TEXT,
    args=_list(_TEXT),
    env=_list(_ENV),
    ports=_list(_object(("containerPort",), containerPort=_COUNT)),
    securityContext=_object(privileged={"type": "boolean"}),
    resources=_object(("limits",), limits=_map(_COUNT)),
    volumeMounts=_list(_object(("name", "mountPath"), name=_NAME, mountPath=_TEXT)),
)
_VOLUME = {
    "oneOf": [
        _object(
            ("name", "persistentVolumeClaim"),
            name=_NAME,
            persistentVolumeClaim=_object(("claimName",), claimName=_NAME),
        ),
        _object(
            ("name", "emptyDir"), name=_NAME, emptyDir=_object(medium={"enum": ["", "Memory"]})
        ),
    ]
}
_POD = _object(
    ("containers",),
    containers=_list(_CONTAINER),
    volumes=_list(_VOLUME),
    restartPolicy={"enum": ["Never", "OnFailure", "Always"]},
    terminationGracePeriodSeconds=_COUNT,
    hostNetwork={"type": "boolean"},
    dnsPolicy={"enum": ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]},
    nodeSelector=_map(_TEXT),
)
_POD_TEMPLATE = _object(("spec",), spec=_POD)
_EXIT_CODES = _object(
    ("operator", "values"),
    containerName=_NAME,
    operator={"enum": ["In", "NotIn"]},
    values=_list(_COUNT),
)
_POD_RULE = _object(
    ("action",),
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=_EXIT_CODES,
    onPodConditions=_list(_object(("type",), type=_TEXT, status={"enum": ["True", "False"]})),
)
_JOB = _object(
    ("template",),
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions=_COUNT,
    parallelism=_COUNT,
    backoffLimit=_COUNT,
    backoffLimitPerIndex=_COUNT,
    podFailurePolicy=_object(("rules",), rules=_list(_POD_RULE)),
    # A pod failure policy asks for it.
    template=_object(
        ("spec",),
        spec={**_POD, "properties": {**_POD["properties"], "restartPolicy": {"const": "Never"}}},
    ),
)
_FAILURE_POLICY = _object(
    maxRestarts=_COUNT,
    rules=_list(
        _object(
            ("action",),
            action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
            onJobFailureReasons=_list(
                {
                    "enum": [
                        *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
                        *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
                    ]
                }
            ),
        )
    ),
)
_JOBSET = _object(
    ("replicatedJobs",),
    failurePolicy=_FAILURE_POLICY,
    network=_object(enableDNSHostnames={"type": "boolean"}, subdomain=_NAME),
    replicatedJobs=_list(
        _object(
            ("name", "template"),
            name=_NAME,
            replicas=_COUNT,
            template=_object(("spec",), spec=_JOB),
        )
    ),
)
_RAY_PARAMETERS = _map({"type": "string"})
_RAY_JOB = _object(
    ("entrypoint", "rayClusterSpec"),
    entrypoint=_TEXT,
    shutdownAfterJobFinishes={"type": "boolean"},
    backoffLimit=_COUNT,
    rayClusterSpec=_object(
        ("headGroupSpec",),
        enableInTreeAutoscaling={"type": "boolean"},
        headGroupSpec=_object(
            ("template", "rayStartParams"), rayStartParams=_RAY_PARAMETERS, template=_POD_TEMPLATE
        ),
        workerGroupSpecs=_list(
            _object(
                ("groupName", "template", "rayStartParams"),
                groupName=_NAME,
                replicas=_COUNT,
                minReplicas=_COUNT,
                maxReplicas=_COUNT,
                rayStartParams=_RAY_PARAMETERS,
                template=_POD_TEMPLATE,
            )
        ),
    ),
)


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=spec,
    )


SCHEMAS = {
    "JobSet": _resource("jobset.x-k8s.io/v1alpha2", "JobSet", _JOBSET),
    "Job": _resource("batch/v1", "Job", _JOB),
    "RayJob": _resource("ray.io/v1", "RayJob", _RAY_JOB),
    "SkyPilot": _object(
        ("run",),
        name=_NAME,
        num_nodes=_COUNT,
        workdir=_TEXT,
        resources=_object(accelerators=_TEXT, use_spot={"type": "boolean"}),
        file_mounts=_map(
            _object(("source",), source=_TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]})
        ),
        setup=_TEXT,
        run=_TEXT,
    ),
}
