"""What is shown: nouns as terminal views. Formats, never predicts or measures."""
