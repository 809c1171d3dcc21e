"""Runs modules of Python's own tests, and prints how each of them ended."""

import sys
import unittest

result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:]).run(result)
lists = {'error': result.errors, 'failure': result.failures, 'skipped': result.skipped}
print('tests:', result.testsRun)
for name, tests in lists.items():
    for test in sorted(test.id() for test, _ in tests):
        print(name, test)
