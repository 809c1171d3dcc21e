//! The floors of each crate.

use super::{Crate, Known, ROOT, Tests, Unit};

/// The engine. Its tests set up whole engines.
pub(super) const STACK: Crate = Crate {
    name: "stack",
    root: "stack/src/lib.rs",
    units: &[
        // The constants that could be others. They are values alone.
        Unit { name: "tuning", modules: &["tuning"], uses: &[], tests: Tests::AsCode },
        Unit { name: "values", modules: &["stats", "ids"], uses: &[], tests: Tests::AsCode },
        Unit { name: "timer", modules: &["timer"], uses: &["values"], tests: Tests::AsCode },
        Unit {
            name: "allowance",
            modules: &["allowance"],
            uses: &["values"],
            tests: Tests::AsCode,
        },
        Unit { name: "memory", modules: &["mem"], uses: &["values"], tests: Tests::AsCode },
        Unit { name: "verbs", modules: &["verbs"], uses: &["values", "memory"], tests: Tests::All },
        Unit {
            name: "ingress",
            modules: &["ingress"],
            uses: &["tuning", "values"],
            tests: Tests::All,
        },
        Unit {
            name: "events",
            modules: &["events"],
            uses: &["values", "verbs"],
            tests: Tests::AsCode,
        },
        Unit { name: "sink", modules: &["sink"], uses: &[], tests: Tests::AsCode },
        Unit {
            name: "credit",
            modules: &["peer", "pacer"],
            uses: &["tuning", "values"],
            tests: Tests::AsCode,
        },
        Unit { name: "cm", modules: &["cm"], uses: &["tuning", "values"], tests: Tests::All },
        Unit {
            name: "recognition",
            modules: &["recognition"],
            uses: &["tuning", "values", "allowance", "credit", "cm"],
            tests: Tests::All,
        },
        Unit {
            name: "handles",
            modules: &["ah"],
            uses: &["memory", "verbs", "credit"],
            tests: Tests::All,
        },
        Unit {
            name: "queues",
            modules: &["qp", "srq", "shared"],
            uses: &[
                "tuning", "values", "timer", "memory", "verbs", "ingress", "events", "sink",
                "credit", "cm", "handles",
            ],
            tests: Tests::All,
        },
        // Roles return and do not call each other: neither of these knows the requester.
        Unit {
            name: "completer",
            modules: &["rc::completer"],
            uses: &["values", "verbs"],
            tests: Tests::All,
        },
        Unit {
            name: "responder",
            modules: &["rc::responder"],
            uses: &["values", "memory", "queues"],
            tests: Tests::All,
        },
        Unit {
            name: "rc",
            modules: &["rc"],
            uses: &[
                "tuning",
                "values",
                "memory",
                "verbs",
                "ingress",
                "sink",
                "credit",
                "queues",
                "completer",
                "responder",
            ],
            tests: Tests::All,
        },
        Unit {
            name: "unreliable",
            modules: &["unreliable"],
            uses: &["tuning", "values", "memory", "verbs", "ingress", "sink", "credit", "queues"],
            tests: Tests::All,
        },
        Unit {
            name: "engine",
            modules: &["engine", "any", "groups", "gsi", "footprint", "recognition::calls"],
            uses: &[
                "tuning",
                "values",
                "timer",
                "memory",
                "verbs",
                "ingress",
                "events",
                "sink",
                "credit",
                "cm",
                "handles",
                "queues",
                "recognition",
                "rc",
                "unreliable",
            ],
            tests: Tests::All,
        },
        Unit {
            name: "root",
            modules: &[ROOT],
            uses: &[
                "tuning",
                "allowance",
                "verbs",
                "ingress",
                "sink",
                "credit",
                "recognition",
                "queues",
                "unreliable",
                "engine",
            ],
            tests: Tests::All,
        },
    ],
    known: &[
        // The state that queue pairs share holds memory that reliable connections lend each other.
        Known { from: "shared", to: "rc::reorder" },
        Known { from: "shared", to: "rc::requester::lists" },
    ],
};
