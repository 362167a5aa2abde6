"""The texts that clients send. `prepare.py` computes the expected results for the same texts."""

PROMPT = "query: "
LONG = " ".join(f"word{i}" for i in range(400))  # much longer than the 256 tokens of all-MiniLM-L6-v2
TEXTS = ["hello world", "x", "What is Deep Learning?", LONG]
DIMENSIONS = 64

QUERY = "what do pandas eat"
DOCUMENTS = [
    "The giant panda lives on bamboo, twenty kilograms of it a day.",
    "Bears sleep in winter.",
    "The capital of France is Paris.",
    "Deep learning is machine learning with deep networks.",
]
PAIR = ("a man eats", "somebody is eating")
LABELS = ["entailment", "neutral", "contradiction"]

# Questions with possible answers. The first answer is right.
FACTS = [
    ("The capital of France is", [" Paris", " London", " a banana"]),
    ("Grass is usually", [" green", " purple", " made of iron"]),
    ("Water boils at 100 degrees", [" Celsius.", " of love.", " tables."]),
]
