"""A chat template of the form that Qwen's have, for tests."""

from __future__ import annotations

import re

# As Qwen's: tools first, reasoning of earlier questions dropped, calls in XML, results as a user's.
QWEN = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% if messages[0].role == 'system' %}
{{ messages[0].content }}{% endif %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{ '\\n' if not loop.first else '\\n\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for k, v in call.function.arguments | items %}
{{- '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""

# The same with calls in the older form, as JSON.
JSON_CALLS = re.sub(
    r"{{- '<tool_call>.*?{{ v.*?</tool_call>' }}",
    """{{- '<tool_call>\\\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{ call.function.arguments | tojson }}{{- '}\\\\n</tool_call>' }}""",
    QWEN,
    flags=re.DOTALL,
)
