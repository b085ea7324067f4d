"""What pyproject.toml cannot say: every package of mmqa_jax, and configs/ as mmqa_jax.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["mmqa_jax*"]), "mmqa_jax.configs"],
    package_dir={"mmqa_jax.configs": "configs"},
    package_data={
        "": [
            "py.typed",
            "*.md",
            "*.json",
            "*.txt",
            "*.toml",
            "*.jinja",
            "targets/*",
            "page/*",
            "templates/*",
        ],
        "mmqa_jax.configs": ["*.py", "*.ipynb", "**/*.py", "**/*.md", "**/*.png"],
    },
)
