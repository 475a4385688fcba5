"""``TextServer``: texts written by a running OpenAI-compatible server (vLLM, SGLang) in place of the model here.

Prompts go as token ids to ``/completions``, many at a time; what comes back as text is tokenised here. A connection that is cut
or stalls, and a server that is busy, are tried again, prompt by prompt.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

TRIES = 6
_FIRST_PAUSE = 0.5  # seconds before the second try; each further pause is twice as long
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class TextServer:
    """Continues prompts by a server at ``url`` (as ``http://host:8000/v1``). Errors end the program with a sentence."""

    model: str
    """What the server calls its model."""

    def __init__(self, url: str, tokenizer: Any, *, concurrency: int, timeout: float) -> None:
        self._url, self._tokenizer = url.rstrip("/"), tokenizer
        self._concurrency, self._timeout = concurrency, timeout
        try:
            self.model = str(self._asked("/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise SystemExit(
                f"--texts-from {url}: /models must list a model, as an OpenAI-compatible server does"
            ) from error

    def sample(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, generator: torch.Generator
    ) -> list[list[int]]:
        """A continuation of each prompt, at most ``new_tokens``, in their order."""
        seeds = torch.randint(1 << 31, (len(prompts),), generator=generator).tolist()
        wanted = [
            dict(
                model=self.model,
                prompt=list(prompt),
                max_tokens=new_tokens,
                temperature=temperature,
                seed=seed,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(self._completed, wanted))

    def _completed(self, wish: dict[str, Any]) -> list[int]:
        answer = self._asked("/completions", wish)
        try:
            text, why = answer["choices"][0]["text"], answer["choices"][0].get("finish_reason")
            ids = list(self._tokenizer(text, add_special_tokens=False).input_ids)
        except Exception as error:  # whatever the server's JSON is
            raise SystemExit(
                f"--texts-from {self._url}: /completions must answer with a text, got {str(answer)[:200]}"
            ) from error
        end = getattr(self._tokenizer, "eos_token_id", None)  # which servers leave out
        return [*ids, *([end] if why == "stop" and end is not None else [])][: wish["max_tokens"]]

    def _asked(self, path: str, wish: dict[str, Any] | None) -> Any:
        """The answer in JSON."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        body = None if wish is None else json.dumps(wish).encode()
        pause, why = _FIRST_PAUSE, ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(pause)
                pause *= 2
            try:
                request = urllib.request.Request(f"{self._url}{path}", body, headers)
                with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                why = f"HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
                if error.code not in _BUSY:
                    raise SystemExit(f"--texts-from {self._url}{path} refuses: {why}") from error
            except (OSError, http.client.HTTPException) as error:  # cut, stalled, not there yet
                why = f"{type(error).__name__}: {error}"
            except ValueError as error:  # neither JSON nor a URL
                raise SystemExit(f"--texts-from {self._url}{path} gives no JSON: {error}") from error
        raise SystemExit(
            f"--texts-from {self._url}{path} failed {TRIES} times; texts that were written stay, and the same command goes on "
            f"from there: {why}"
        )
