"""Exit with 0 if the broker of this container is alive, else with 1 and the reason.

``/healthz`` says so while restarting would not help, for example with a full disk. HEALTH_URL is its address.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

url = os.environ.get("HEALTH_URL", "http://127.0.0.1:7701/healthz")
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is this container's own address
try:
    with urllib.request.urlopen(url, timeout=4, context=context) as response:
        print(response.read().decode())
except urllib.error.HTTPError as problem:
    sys.exit(f"{problem.code}: {problem.read().decode()}")
except OSError as problem:
    sys.exit(f"{url}: {problem}")
