"""Rules: engine arguments that fit no model or each other, and the checkpoint."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from airflow_provider_vllm.diagnosis.rule import Rule


def derived_length(match: re.Match[str], _: Sequence[str]) -> dict[str, Any] | None:
    """The longest context that the model's own config allows."""
    limits = [int(float(value)) for value in match.group("derived", "tokenizer") if value]
    return {"max_model_len": min(limits)} if limits else None


def largest_divisor(match: re.Match[str], _: Sequence[str]) -> dict[str, Any] | None:
    """The largest tensor parallel size below the one asked for that divides the heads."""
    heads, size = int(match["heads"]), int(match["size"])
    fitting = next((n for n in range(size - 1, 0, -1) if heads % n == 0), None)
    return {"tensor_parallel_size": fitting} if fitting else None


def batched_tokens(match: re.Match[str], _: Sequence[str]) -> dict[str, Any] | None:
    """As many batched tokens as the context is long."""
    return {"max_num_batched_tokens": int(match["length"])} if match["length"] else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="unknown_parser",
        group="model_config",
        pattern=r"invalid (?:tool call|reasoning) parser: (?P<parser>[^\s']+)|(?:Tool|Reasoning) parser '(?P<name>[^']+)' not found|requires --(?P<missing>(?:tool-call|reasoning)-parser)|reasoning_parser_name=\S* has not been registered",
        explanation="The parser of tool calls or reasoning is missing or unknown to this vLLM release[: {parser}][: {name}][: {missing}].",
        first_action="Set tool_call_parser (reasoning_parser) to one that this release lists; newer models need a newer vLLM.",
        launch=False,
        request=None,
        examples=(
            "KeyError: 'invalid tool call parser: qwen9 (chose from { hermes,llama3_json,mistral })'",
            "KeyError: \"Tool parser 'qwen9' not found.\"",
            "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser",
        ),
    ),
    Rule(
        id="max_model_len_above_model_limit",
        group="model_config",
        pattern=r"(?:Value error, )?User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \((?:\w+=(?P<derived>[\d.]+)|None)(?: or (?:model_max_length=)?(?:(?P<tokenizer>\d[\d.]*)|None))?",
        explanation="max_model_len is {asked}, more than the model's own limit[, {derived}].",
        first_action="Lower max_model_len to the model's limit.",
        launch=False,
        request=None,
        remedy=derived_length,
        examples=(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=2048.0 or model_max_length=None in model's config.json).",
            "ValueError: User-specified max_model_len (32768) is greater than the derived max_model_len (max_position_embeddings=8192 or model_max_length=None in model's config.json).",
        ),
    ),
    Rule(
        id="tensor_parallel_not_divisible",
        group="model_config",
        pattern=r"(?:Value error, )?Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<size>\d+)\)",
        explanation="{heads} attention heads cannot be spread over {size} GPUs.",
        first_action="Choose a number of GPUs that divides {heads}.",
        launch=False,
        request=None,
        remedy=largest_divisor,
        examples=(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, Total number of attention heads (2) must be divisible by tensor parallel size (3). [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]",
        ),
    ),
    Rule(
        id="weights_not_divisible",
        group="model_config",
        pattern=r"(?<!\S)\S{0,60}size(?:_per_partition)? ?=? ?\S+ is not divisible by|is not divisible by (?:weight quantization block|the quantized weight|min_thread|group_size|tp_size|tensor parallel)|must be divisible by (?:num_\w+|tensor|tp|the number of)|The (?:input|output) size is not aligned with the quantized weight shape|sum\(partitions\)=.*does not match|not divisible by \d+$",
        explanation="The weights cannot be cut into this many parts.",
        first_action="Lower tensor_parallel_size (or use pipeline_parallel_size).",
        launch=False,
        request=None,
        confidence=0.9,
        examples=(
            "(Worker_TP0 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:953] ValueError: Weight input_size_per_partition = 4736 is not divisible by min_thread_k = 128. Consider reducing tensor_parallel_size or running with --quantization gptq.",
        ),
    ),
    Rule(
        id="quantization_mismatch",
        group="model_config",
        pattern=r"Quantization method specified in the model config \((?P<model>[^)]+)\) does not match the quantization method specified in the `quantization` argument \((?P<asked>[^)]+)\)",
        explanation="The checkpoint is quantized with {model}, the launch asked for {asked}.",
        first_action="Leave the quantization argument out: vLLM reads it from the checkpoint.",
        launch=False,
        request=None,
        remedy=lambda match, messages: {"quantization": None},
        examples=(
            "ValueError: Quantization method specified in the model config (compressed-tensors) does not match the quantization method specified in the `quantization` argument (awq).",
        ),
    ),
    Rule(
        id="unknown_quantization",
        group="model_config",
        pattern=r"Unknown quantization (?:method|scheme|config|type)|is not supported for quantization method|Cannot find the config file for|[Uu]nsupported quantization|No compressed-tensors compatible scheme|Can't find (?:a )?quantization|Unsupported (?:FP8|quant)\w* ",
        explanation="vLLM does not know, or cannot use, this quantization.",
        first_action="Take a checkpoint in a quantization (and dtype) that this vLLM release supports.",
        launch=False,
        request=None,
        examples=(
            "ValueError: Unknown quantization method: hqq. Must be one of ['awq', 'fp8', 'gptq'].",
            "ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]",
        ),
    ),
    Rule(
        id="transformers_too_old",
        group="model_config",
        pattern=r"(?:Value error, )?The checkpoint you are trying to load has model type `(?P<type>[^`]+)` but Transformers does not recognize this architecture",
        explanation="The installed transformers does not know models of type {type}.",
        first_action="Upgrade transformers (with vLLM), or check the model_type in the model's config.json.",
        launch=False,
        request=None,
        examples=(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, The checkpoint you are trying to load has model type `nosuch` but Transformers does not recognize this architecture. This could be because of an issue with the checkpoint.",
        ),
    ),
    Rule(
        id="unsupported_architecture",
        group="model_config",
        pattern=r"(?:Value error, )?Model architectures (?P<architectures>\[[^\]]*\]) (?:are not supported for now|has no vLLM implementation)|has no vLLM implementation and the Transformers implementation is not compatible|No model architectures are specified|Cannot find model module|architecture \S+ (?:is )?not supported",
        explanation="This vLLM release has no implementation of the model[: {architectures}].",
        first_action="Upgrade vLLM, or take a model that it supports.",
        launch=False,
        request=None,
        examples=(
            "ValueError: Model architectures ['MiniCPM5ForCausalLM'] are not supported for now. Supported architectures: dict_keys(['AquilaModel'])",
        ),
    ),
    Rule(
        id="model_inspection_failed",
        group="model_config",
        pattern=r"(?:Value error, )?Model architectures (?P<architectures>\[[^\]]*\]) failed to be inspected",
        explanation="vLLM could not import its own implementation of the model ({architectures}).",
        first_action="Look above for the traceback of `models.registry`: a package is missing or of the wrong version.",
        launch=False,
        request=None,
        victim=True,
        examples=(
            "ValueError: Model architectures ['GraniteForCausalLM'] failed to be inspected. Please check the logs for more details.",
        ),
    ),
    Rule(
        id="trust_remote_code_required",
        group="model_config",
        pattern=r"consider setting `trust_remote_code=True`|[Pp]lease pass the argument `trust_remote_code=True`|requires you to execute the (?:configuration|configuration file|model|tokenizer|custom)|Loading \S+ requires (?:you )?to execute",
        explanation="The model brings its own Python code, which runs only when it is trusted.",
        first_action="Read that code, then set trust_remote_code.",
        launch=False,
        request=None,
        remedy=lambda match, messages: {"trust_remote_code": True},
        examples=(
            "RuntimeError: Failed to load the model config. If the model is a custom model not yet available in the HuggingFace transformers library, consider setting `trust_remote_code=True` in LLM or using the `--trust-remote-code` flag in the CLI.",
        ),
    ),
    Rule(
        id="batched_tokens_below_model_len",
        group="model_config",
        pattern=r"(?:Value error, )?max_num_batched_tokens \((?P<tokens>\d+)\) is smaller than max_model_len \((?P<length>\d+)\)|max_num_batched_tokens \(\d+\) must be greater than or equal to max_num_seqs",
        explanation="max_num_batched_tokens[ ({tokens})] is too low[: max_model_len is {length}, and prefills are not chunked].",
        first_action="Raise max_num_batched_tokens, or enable chunked prefill.",
        launch=False,
        request=None,
        remedy=batched_tokens,
        examples=(
            "ValueError: max_num_batched_tokens (2048) is smaller than max_model_len (4096). This effectively limits the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences.",
        ),
    ),
    Rule(
        id="media_above_batched_tokens",
        group="model_config",
        pattern=r"max_tokens_per_mm_item \((?P<length>\d+)\) is larger than max_num_batched_tokens \((?P<tokens>\d+)\)",
        explanation="One image or video may take {length} tokens, a batch only {tokens}.",
        first_action="Raise max_num_batched_tokens to at least {length}.",
        launch=False,
        request=None,
        remedy=batched_tokens,
        examples=(
            "ValueError: Chunked MM input disabled but max_tokens_per_mm_item (2496) is larger than max_num_batched_tokens (2048). Please increase max_num_batched_tokens.",
        ),
    ),
    Rule(
        id="cpu_kvcache_not_an_integer",
        group="model_config",
        pattern=r"(?:Value error, )?invalid literal for int\(\) with base 10: '(?P<value>[^']*)'",
        explanation="A setting that must be a whole number is not one[: {value}].",
        first_action="Check the integer settings: of vLLM's variables, VLLM_CPU_KVCACHE_SPACE takes whole GiB only.",
        launch=False,
        request=None,
        confidence=0.85,
        examples=(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, invalid literal for int() with base 10: '0.0001' [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]",
        ),
    ),
    Rule(
        id="no_weights",
        group="model_config",
        pattern=r"Cannot find any model weights with|No (?:\S+ )?(?:safetensors|weight|bin) files? (?:were )?found|does not appear to have a file named (?:pytorch_model|model)\S*",
        explanation="There are no weight files in the model's folder.",
        first_action="Download the model completely (the folder must hold *.safetensors), or set load_format.",
        launch=False,
        request=None,
        examples=(
            "(Worker pid=15465) ERROR 11-30 09:52:05 [multiproc_executor.py:953] RuntimeError: Cannot find any model weights with `/data/m_nofile`",
        ),
    ),
    Rule(
        id="weights_broken",
        group="model_config",
        pattern=r"SafetensorError|Error while deserializing header|PytorchStreamReader failed|invalid load key|unexpected EOF, expected|UnpicklingError|MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeader|file not fully covered",
        explanation="A weight file is broken or was not downloaded to its end.",
        first_action="Download the weight files again and compare their sizes (Git LFS pointers are 130 bytes).",
        launch=False,
        request=None,
        examples=(
            "(Worker pid=14872) ERROR 11-30 09:51:06 [multiproc_executor.py:953] safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        ),
    ),
    Rule(
        id="weights_do_not_fit_model",
        group="model_config",
        pattern=r"Following weights were not initialized from checkpoint|KeyError: '(?P<key>(?:\S*(?:layers|model|weight|embed|lm_head|proj|norm|expert|block|bias|scale)[^']*))'|There is no module or parameter named|[Ww]eight .{0,80}(?:shape|size).{0,40}mismatch|Attempted to load weight \(|size mismatch for|assert (?:param_size|loaded_weight|param\.\w+|weight)|shape mismatch|AssertionError: Tried to load weights|copy_\(\)?.{0,20}size of tensor|The size of tensor a \(\d+\) must match|The expanded size of the tensor|start \(\d+\) \+ length \(\d+\) exceeds dimension size",
        frames=r"load_weights|weight_loader|model_loader|loader\.py|load_model",
        explanation="The weights in the checkpoint are not those that this model in vLLM expects.",
        first_action="Check that the checkpoint is of this architecture and quantization; upgrade vLLM when the model is newer than it.",
        launch=False,
        request=None,
        confidence=0.9,
        examples=(
            "ERROR 05-23 09:31:47 [core.py:396] Traceback (most recent call last):\n"
            'ERROR 05-23 09:31:47 [core.py:396]   File "vllm/model_executor/models/llama.py", line 417, in load_weights\n'
            "ERROR 05-23 09:31:47 [core.py:396] KeyError: 'layers.0.mlp.gate_up_proj.qweight_type'",
        ),
    ),
    Rule(
        id="weights_of_another_model",
        group="model_config",
        pattern=r"There is no module or parameter named '(?P<name>[^']+)'|^KeyError: '(?:\w+\.)?(?:layers|h|blocks)\.\d+\.[\w.]+'",
        explanation="The checkpoint holds a weight that this model in vLLM does not have.",
        first_action="Check that the checkpoint is of this architecture and quantization; upgrade vLLM when the model is newer than it.",
        launch=False,
        request=None,
        confidence=0.85,
        examples=(
            "ValueError: There is no module or parameter named 'lm_head.qweight_type' in Qwen2ForCausalLM",
            "KeyError: 'layers.0.mlp.down_proj.weight'",
        ),
    ),
    Rule(
        id="tokenizer_broken",
        group="model_config",
        pattern=r"Can't load (?:the )?tokenizer|Tokenizer class \S+ does not exist|Couldn't instantiate the backend tokenizer|TypeError: not a string|Unable to load (?:vocabulary|tokenizer)|data did not match any variant of untagged enum|Unrecognized (?:processing|feature extractor) class|Can't load (?:the )?(?:image processor|feature extractor|processor)|No tokenizer file found|sentencepiece.*(?:Error|not found)|ModelWrapper|tokenizer file .* not found",
        explanation="The tokenizer's files are missing or broken.",
        first_action="Put the model's tokenizer files beside its weights (tokenizer.json, tokenizer_config.json), or set tokenizer.",
        launch=False,
        request=None,
        examples=(
            "ValueError: Couldn't instantiate the backend tokenizer from one of: ",
            "OSError: Can't load tokenizer for '/data/m'. If you were trying to load it from 'https://huggingface.co/models', make sure you don't have a local directory with the same name.",
        ),
    ),
    Rule(
        id="processor_failed",
        group="model_config",
        pattern=r"Failed to apply (?P<processor>\w*Processor\w*) on data",
        explanation="The model's own {processor} (transformers) could not handle the media.",
        first_action="Use the transformers version that the model's card names; if one request did it, leave that request out.",
        launch=True,
        request=False,
        confidence=0.75,
        examples=(
            "ERROR 02-27 18:50:20 engine.py:389] RuntimeError: Failed to apply Qwen2_5_VLProcessor on data={'text': '<|image_pad|>'}",
        ),
    ),
    Rule(
        id="json_broken",
        group="model_config",
        pattern=r"JSONDecodeError: (?P<what>[^\n]+)|(?:^|\n)(?P<file>[^\n]+is not a valid JSON file)",
        explanation="A JSON file of the model (or a JSON argument) is broken[: {what}][: {file}].",
        first_action="Download the model's small files (config.json, tokenizer_config.json) again, or check JSON arguments.",
        launch=False,
        request=None,
        confidence=0.85,
        examples=(
            "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 3 (char 2)",
        ),
    ),
    Rule(
        id="chat_template_path",
        group="model_config",
        pattern=r"chat template path.{0,10}(?:doesn't|does not) exist|supplied chat template .{0,160}(?:doesn't|does not|not) (?:exist|appear)|looks like a file path, but it failed to be opened",
        explanation="The chat template that the launch names does not exist.",
        first_action="Correct chat_template.",
        launch=False,
        request=None,
        examples=(
            "ValueError: The supplied chat template string (/data/t.jinja) appears path-like, but doesn't exist!",
        ),
    ),
    Rule(
        id="not_enough_gpus",
        group="model_config",
        pattern=r"(?:World size|world_size|[Tt]ensor parallel size|TP size).{0,60}(?:is )?(?:larger|greater|exceeds?|more) than the (?:number of )?(?:available|visible) (?:GPUs|devices)|invalid device ordinal|please ensure that world_size .{0,60}(?:is less than|GPUs)|DP adjusted local rank \d+ is out of bounds",
        explanation="More GPUs were asked for than this host shows.",
        first_action="Set gpus (tensor_parallel_size times pipeline_parallel_size) to what nvidia-smi shows here.",
        launch=False,
        request=None,
        examples=(
            "ValueError: World size (2) is larger than the number of available GPUs (1) in this node. If this is intentional and you are using: ray, set --distributed-executor-backend ray.",
            "RuntimeError: CUDA error: invalid device ordinal",
        ),
    ),
    Rule(
        id="cudagraph_config",
        group="model_config",
        pattern=r"CUDAGraphMode\.\w+ is not supported with|cudagraph_mode|compilation_config",
        explanation="The CUDA graph settings do not fit the model or its attention backend.",
        first_action="Leave compilation_config out (or start with enforce_eager).",
        launch=False,
        request=None,
        confidence=0.85,
        examples=(
            "ValueError: CUDAGraphMode.FULL is not supported with FlashInferBackend backend (support: AttentionCGSupport.UNIFORM_BATCH)",
        ),
    ),
    Rule(
        id="compile_cache_corrupt",
        group="model_config",
        pattern=r"vLLM failed to compile the model|failed to get the hash of the compiled graph|corrupted compilation artifact",
        explanation="A compiled graph in the cache is broken, usually from a start that was cut off.",
        first_action="Delete the compile cache (VLLM_CACHE_ROOT/torch_compile_cache) and start again.",
        launch=False,
        request=None,
        examples=(
            "RuntimeError: vLLM failed to compile the model. The most likely reason for this is that a previous compilation failed, leading to a corrupted compilation artifact.",
        ),
    ),
    Rule(
        id="compile_failed",
        group="model_config",
        pattern=r"torch\._dynamo\.exc\.\w+(?:: (?P<what>[^\n]+))?|torch\._inductor\.exc\.\w+(?:: (?P<inductor>[^\n]+))?|InductorError|BackendCompilerFailed|TorchRuntimeError",
        explanation="torch.compile could not compile the model.",
        first_action="Start with enforce_eager, which leaves compilation out.",
        launch=False,
        request=None,
        remedy=lambda match, messages: {"enforce_eager": True},
        confidence=0.85,
        examples=(
            "torch._inductor.exc.InductorError: AssertionError: -603979776",
            "torch._dynamo.exc.BackendCompilerFailed: backend='<vllm.compilation.backends.VllmBackend object>' raised:",
        ),
    ),
    Rule(
        id="config_attribute_missing",
        group="model_config",
        pattern=r"AttributeError: '(?P<config>\w*Config\w*)' object has no attribute '(?P<name>\w+)'|KeyError: '(?:rope_type|factor|type|rope_theta|model_type|architectures|quant_method|original_max_position_embeddings|default|mrope)'|`?rope_scaling`? (?:must|should|has|is)",
        explanation="The model's config lacks something that this vLLM or transformers release reads[ ({config}.{name})].",
        first_action="Use the vLLM and transformers versions that the model's card names.",
        launch=False,
        request=None,
        confidence=0.85,
        examples=("AttributeError: 'Qwen2VLConfig' object has no attribute 'vocab_size'",),
    ),
)
