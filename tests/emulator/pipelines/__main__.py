from . import PIPELINES, compile

for pipeline in PIPELINES.values():
    pipeline.source.with_suffix(".ptx").write_text(compile(pipeline))
