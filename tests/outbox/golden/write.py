"""Write the texts of the step to this version beside this file; for a version that nobody has yet."""

from pathlib import Path

from escrowmq.outbox import ddl, migrations, tables

for kind in migrations.DIALECTS:
    text = ";\n".join([*ddl(kind, tables.SCHEMA_VERSION - 1), ""])
    (Path(__file__).parent / f"version-{tables.SCHEMA_VERSION}-{kind}.sql").write_text(text)
