"""The APIs that clients speak: request bodies, handlers and response contents of TEI, OpenAI and Cohere."""
