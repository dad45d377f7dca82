"""The one model that these tests load, as SGLang's external model package: its registry would import two hundred others."""
