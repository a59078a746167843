import io
import json
import logging

from recsys.serving import logs


def test_every_line_of_the_log_is_one_json_object():
    stream = io.StringIO()
    logs.configure(stream)
    logger = logging.getLogger("recsys.serving.test")
    logger.info("a\nb %s", "c", extra={"fields": {"route": "/x\n\u2028", "status": 200}})
    try:
        raise ValueError("no\nway")
    except ValueError:
        logger.exception("failed")
    logging.getLogger("uvicorn.error").info("not said")
    logging.getLogger("uvicorn.error").warning("said")
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["message"], first["route"], first["status"]) == ("a\nb c", "/x\n\u2028", 200)
    assert (first["level"], first["logger"]) == ("info", "recsys.serving.test")
    assert first["time"].endswith("+00:00")
    assert second["exception"].endswith("ValueError: no\nway")
    assert third["message"] == "said"
