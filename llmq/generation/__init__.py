"""Text from a model: prompts and chats to tokens, and tokens to text as they come."""
