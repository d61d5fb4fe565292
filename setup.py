"""Map the top-level folders to sub-packages of the ``foregate`` namespace; packages are found, not listed."""

from setuptools import find_namespace_packages, setup

FOLDERS = ["collect", "predictors", "runtime", "train", "configs", "cli"]

packages = [
    f"foregate.{name}"
    for folder in FOLDERS
    for name in [folder, *(f"{folder}.{sub}" for sub in find_namespace_packages(folder))]
    if "__pycache__" not in name
]

setup(
    packages=packages,
    package_dir={f"foregate.{folder}": folder for folder in FOLDERS},
    package_data={"": ["*.yaml", "*.json", "*.safetensors", "*.txt", "*.md", "*.jinja"]},
    include_package_data=False,
)
