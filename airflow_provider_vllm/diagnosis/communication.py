"""Rules: processes or nodes cannot talk to each other."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

from airflow_provider_vllm.diagnosis.rule import Rule

_HUBS = r"huggingface|hf\.co|hf-mirror|modelscope|/resolve/|port=443|:443"

CLIENTS: tuple[Rule, ...] = (
    Rule(
        id="connection_refused",
        group="communication",
        pattern=rf"^(?![^\n]*(?:{_HUBS}))[^\n]*(?:ConnectionRefusedError|\[Errno 111\]|[Cc]onnection refused|Cannot connect to host)|^(?:openai\.)?APIConnectionError: Connection error",
        explanation="A client asked before the server listened, or after it had ended.",
        first_action="Wait until the server is ready (the sensor, or 200 from /v1/models) before sending; a big model loads for minutes.",
        launch=True,
        request=True,
        victim=True,
        confidence=0.6,
        examples=(
            "requests.exceptions.ConnectionError: HTTPConnectionPool(host='localhost', port=8000): Max retries exceeded with url: /v1/completions (Caused by NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))",
            "ConnectionRefusedError: [Errno 111] Connection refused",
        ),
        near_misses=(
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /a/b (Caused by NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))",
            "curl: (7) Failed to connect to localhost port 8000: Connection refused",
        ),
    ),
)

RULES: tuple[Rule, ...] = (
    Rule(
        id="dev_shm_too_small",
        group="communication",
        pattern=r"Insufficient space in (?P<path>\S+) for (?P<what>.+?): (?P<need>\d+) MiB required, (?P<free>\d+) MiB free|failed to extend /dev/shm/nccl-\S+ to (?P<bytes>\d+) bytes|Error while creating shared memory segment|unable to (?:write to file|mmap|open shared memory object) </?(?:torch_|dev/shm)|The /dev/shm has only|DataLoader worker .* is killed by signal: Bus error|No space left on device.{0,80}/dev/shm|/dev/shm.{0,80}No space left on device|unable to (?:allocate|resize|create) shared memory",
        explanation="/dev/shm is too small for what the processes share (containers get 64 MB).",
        first_action="Give the container more shared memory (--shm-size=8g or --ipc=host).",
        launch=False,
        request=None,
        native=True,
        examples=(
            "(EngineCore pid=20169) ERROR 11-30 09:59:01 [core.py:1510] RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 0 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host).",
            "node1:212:300 [1] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-abcdef to 33030532 bytes",
            "node1:212:300 [1] include/shm.h:48 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Lx2 (size 9637888)",
        ),
        near_misses=(
            "node1:212:300 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct",
        ),
    ),
    Rule(
        id="nccl_driver_mismatch",
        group="communication",
        pattern=r"NCCL WARN Cuda failure (?:\d+ )?'(?P<what>[^']+)'|NCCL WARN CUDA driver version is insufficient",
        explanation="NCCL's own CUDA call failed[: {what}].",
        first_action="Look at this CUDA error, not at the network: check nvidia-smi on this host for the GPU's state and driver.",
        launch=False,
        request=None,
        needs=r"NCCL|nccl|DistBackend|Gloo|CUDA error",
        native=True,
        confidence=0.85,
        examples=("host:66:66 [0] enqueue.cc:229 NCCL WARN Cuda failure 'invalid argument'",),
    ),
    Rule(
        id="nccl_network_plugin",
        group="communication",
        pattern=r"NCCL WARN (?:NET/|Call to (?:ibv_|connect|bind|socket)|socket\w* ?: ?|Net : |Bootstrap : no socket|No IP interface found|Timeout waiting for connection|Connect to .* failed|socketStartConnect|ncclSocket\w+: )",
        explanation="NCCL could not open its network between the processes or nodes.",
        first_action="Set NCCL_SOCKET_IFNAME (and VLLM_HOST_IP) to the interface that the nodes share.",
        launch=False,
        request=None,
        needs=r"NCCL|nccl|DistBackend|Gloo|CUDA error",
        native=True,
        confidence=0.85,
        examples=(
            "node1:212:300 [1] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.1<4242> failed : Software caused connection abort",
            "node1:212:300 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
        ),
    ),
    Rule(
        id="nccl_duplicate_gpu",
        group="communication",
        pattern=r"NCCL WARN Duplicate GPU detected|Duplicate GPU detected : rank",
        explanation="Two ranks were given the same GPU.",
        first_action="Give each rank its own GPU (CUDA_VISIBLE_DEVICES); tensor_parallel_size must not exceed the visible GPUs.",
        launch=False,
        request=None,
        native=True,
        examples=(
            "host:66:66 [0] init.cc:1358 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device b3000",
        ),
    ),
    Rule(
        id="nccl_warning",
        group="communication",
        pattern=r"NCCL WARN (?!NET/Plugin|Plugin|MSCCL|NUMA|Linux kernel|Missing|ras/|NCCL_\w+ set)(?P<what>\S[^\n]*)",
        explanation="NCCL, which connects the GPUs, failed: {what}.",
        first_action="Look up what this line names on this host (driver, topology, network), before anything in vLLM.",
        launch=True,
        request=None,
        needs=r"NCCL error|DistBackendError",
        native=True,
        confidence=0.8,
        examples=(
            "host:301:301 [0] misc/nvmlwrap.cc:187 NCCL WARN nvmlDeviceGetHandleByPciBusId() failed: Not Found\n"
            "(Worker_TP0 pid=301) ERROR 10-02 03:24:44 [multiproc_executor.py:581] RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        ),
        near_misses=(
            "host:301:301 [0] misc/nvmlwrap.cc:187 NCCL WARN something odd\n"
            "(Worker_TP0 pid=301) ERROR 10-02 03:24:44 [multiproc_executor.py:581] ValueError: No available memory for the cache blocks.",
        ),
    ),
    Rule(
        id="nccl_collective_timeout",
        group="communication",
        pattern=r"Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out|collective operation timeout: WorkNCCL",
        explanation="A collective did not finish in time: some rank never came to it. The rank that reports it is the victim.",
        first_action="Find the rank that is missing (its own last line); start once with NCCL_DEBUG=INFO.",
        launch=True,
        request=True,
        native=True,
        victim=True,
        confidence=0.8,
        examples=(
            "[rank1]:[E123 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=104, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
        ),
    ),
    Rule(
        id="rendezvous_failed",
        group="communication",
        pattern=r"DistNetworkError|DistStoreError|The client socket has (?:failed to connect|timed out)|The server socket has failed to (?:listen|bind)|Barrier timed out after|Timed out after \d+ seconds waiting for clients|connect\(\) timed out|wait timeout after \d+ms, keys|Gloo connectFullMesh failed|makeDeviceForHostname|(?:ifa|iface|interface).{0,30}(?:not found|!= nullptr)|Unable to find address for",
        explanation="The processes of the engine did not find each other.",
        first_action="Set VLLM_HOST_IP (and GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) to an address that all nodes reach.",
        launch=True,
        request=None,
        victim=False,
        confidence=0.8,
        examples=(
            "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.5, 29500).",
            "(Worker pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:953] RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        ),
    ),
    Rule(
        id="nccl_peer_lost",
        group="communication",
        pattern=r"NCCL error: remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted|Connection closed by (?:remote )?peer|Connection reset by peer|socket timeout on|gloo/transport/tcp/pair\.cc|Broken pipe|recvBytes|Application timeout caused pair closure",
        explanation="The connection to another rank broke: that process or node went first.",
        first_action="Look at the peer: its log, or its node's kernel log, has the cause.",
        launch=True,
        request=True,
        victim=True,
        confidence=0.75,
        examples=(
            "(Worker_TP1 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:61234",
            "(Worker_TP1 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] RuntimeError: NCCL error: remote process exited or there was a network error",
        ),
    ),
    Rule(
        id="nccl_cuda_error",
        group="communication",
        pattern=r"NCCL error(?: in)?: .*unhandled cuda error|ncclUnhandledCudaError|unhandled cuda error",
        explanation="NCCL met a CUDA error: the GPU or its driver is at fault, not the network.",
        first_action="Start once with NCCL_DEBUG=INFO: the NCCL WARN line before this one names the CUDA error.",
        launch=False,
        request=None,
        victim=True,
        confidence=0.85,
        examples=(
            "(VllmWorkerProcess pid=760) ERROR 07-24 08:26:01 multiproc_worker_utils.py:226] RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        ),
    ),
    Rule(
        id="nccl_error",
        group="communication",
        pattern=r"NCCL error\b|torch\.distributed\.DistBackendError|ncclSystemError|ncclInternalError",
        explanation="NCCL, which connects the GPUs, failed.",
        first_action="Start once with NCCL_DEBUG=INFO: the NCCL WARN line before this one names the cause.",
        launch=True,
        request=None,
        confidence=0.85,
        examples=(
            "(VllmWorkerProcess pid=232) ERROR 08-23 08:25:25 multiproc_worker_utils.py:226] RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "[rank0]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5",
        ),
        near_misses=("INFO 08-23 08:25:25 pynccl.py:63] vLLM is using nccl==2.20.5",),
    ),
    Rule(
        id="execute_model_rpc_timeout",
        group="communication",
        pattern=r"RPC call to (?P<method>\w+) timed out|TimeoutError: RPC call|RayChannelTimeoutError|execute_model timed out",
        explanation="The workers did not answer[ {method}] in time: one of them hangs or the step is too long.",
        first_action="Take a py-spy dump of each worker while it hangs; for steps that are only long raise VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS.",
        launch=True,
        request=True,
        victim=True,
        confidence=0.8,
        examples=(
            "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1512] TimeoutError: RPC call to execute_model timed out.",
        ),
    ),
    Rule(
        id="host_ip_not_unique",
        group="communication",
        pattern=r"Every node should have a unique IP address",
        explanation="Two Ray nodes report the same IP address.",
        first_action="Set VLLM_HOST_IP on each node to its own address.",
        launch=False,
        request=None,
        examples=(
            "RuntimeError: Every node should have a unique IP address. Got 2 nodes with node ids ['a', 'b'] and 1 unique IP addresses {'10.0.0.5'}.",
        ),
    ),
    Rule(
        id="custom_allreduce_failed",
        group="communication",
        pattern=r"custom_all_reduce\.cuh:\d+ '(?P<what>[^']+)'|CUDART error: |Failed: Cuda error .*custom_all_reduce|Error happened when batch testing peer-to-peer access",
        explanation="Direct GPU-to-GPU access failed.",
        first_action="Start with disable_custom_all_reduce.",
        launch=False,
        request=None,
        native=True,
        confidence=0.9,
        examples=(
            "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:368 'invalid argument'",
        ),
    ),
    Rule(
        id="kv_connector",
        group="communication",
        pattern=r"(?:NIXL|nixl|LMCache|Mooncake|mooncake|kv_connector|KVConnector)\b.*(?:[Ee]rror|[Ff]ailed|not )",
        explanation="The KV connector between the engines failed.",
        first_action="Check the connector's peer and its package version.",
        launch=True,
        request=True,
        confidence=0.7,
        examples=(
            "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] RuntimeError: NIXL is not available",
        ),
    ),
)
