"""Parameter servers: processes that own rows of tables and apply gradients to them.

A worker pulls the rows that a batch needs and pushes their gradients. `table` holds rows and updates them; `placement`
decides which server owns a row, and `clocks` when a pull may be answered and a push applied. These are pure: arrays and
numbers, no I/O.

docs/design/parameter-servers.md explains the whole.
"""
