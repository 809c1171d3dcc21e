# Runs tests of rdma-core's suite by their names, and says of each how it ended.
#
# The arguments are those of the suite's own run_tests.py, then `--` and the names of tests without
# `tests.` before them. Lines of standard output that begin with a mark are ours:
#     @begin NAME
#     @end NAME ok|skipped|failed REASON

import sys
import unittest

split = sys.argv.index('--')
names = sys.argv[split + 1:]
del sys.argv[split:]
sys.path[:0] = ['.', 'tests']

from args_parser import parser  # noqa: E402

parser.parse_args()


def say(*words):
    print(*words, flush=True)


class Result(unittest.TestResult):
    def startTest(self, test):
        super().startTest(test)
        self.verdict = ('ok', '')
        say('@begin', test.id())

    def stopTest(self, test):
        super().stopTest(test)
        verdict, reason = self.verdict
        say('@end', test.id(), verdict, ' '.join(str(reason).split()))

    def addSkip(self, test, reason):
        self.verdict = ('skipped', reason)

    def addError(self, test, error):
        self.verdict = ('failed', repr(error[1]))

    addFailure = addError

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.verdict = ('failed', repr(error[1]))

    def addExpectedFailure(self, test, error):
        pass

    def addUnexpectedSuccess(self, test):
        self.verdict = ('failed', 'it succeeded, which it should not')


for name in names:
    unittest.defaultTestLoader.loadTestsFromName('tests.' + name).run(Result())
