"""What every message on the control plane is: a MessagePack map that names its kind."""

import msgspec


class Message(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True):
    """Base of all messages."""
