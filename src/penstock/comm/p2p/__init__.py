"""Messages on their way between stages: routing, mailboxes and transports."""
