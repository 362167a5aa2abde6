"""The API dialects: request bodies, handlers and responses in the forms of TEI, OpenAI and Cohere."""
