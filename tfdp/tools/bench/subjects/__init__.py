"""What is measured: models, gradient lists, images; alike for every arm."""
