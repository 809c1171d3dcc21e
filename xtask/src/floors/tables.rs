//! The floors of each crate.

use super::{Crate, Known, ROOT, Tests, Unit};

/// Three floors: values, providers, and the fronts that programs use. Tests set up whole devices.
pub(super) const VERBS_API: Crate = Crate {
    name: "verbs-api",
    root: "verbs-api/src/lib.rs",
    units: &[
        Unit { name: "tuning", modules: &["tuning"], uses: &[], tests: Tests::AsCode },
        Unit { name: "model", modules: &["model"], uses: &[], tests: Tests::AsCode },
        Unit {
            name: "provider",
            modules: &["provider"],
            uses: &["tuning", "model"],
            tests: Tests::AsCode,
        },
        Unit {
            name: "soft",
            modules: &["soft"],
            uses: &["tuning", "model", "provider"],
            tests: Tests::All,
        },
        Unit {
            name: "kernel",
            modules: &["kernel"],
            uses: &["tuning", "model", "provider"],
            tests: Tests::AsCode,
        },
        Unit {
            name: "objects",
            modules: &[
                "ah", "context", "cq", "device", "mr", "mw", "open", "plain", "qp", "srq", "choice",
            ],
            uses: &["tuning", "model", "provider", "soft", "kernel"],
            tests: Tests::All,
        },
        Unit {
            name: "cm",
            modules: &["cm"],
            uses: &["model", "provider", "objects"],
            tests: Tests::All,
        },
        Unit {
            name: "exchange",
            modules: &["exchange"],
            uses: &["tuning", "model", "objects", "cm"],
            tests: Tests::All,
        },
        Unit {
            name: "asynchronous",
            modules: &["asynchronous"],
            uses: &["model", "provider", "objects", "cm", "exchange"],
            tests: Tests::All,
        },
        Unit {
            name: "root",
            modules: &[ROOT, "doc", "fuzzing", "guide", "prelude", "stats", "verbs"],
            uses: &["model", "kernel", "objects", "cm", "exchange", "asynchronous"],
            tests: Tests::All,
        },
    ],
    known: &[],
};

/// The engine. Its tests set up whole engines.
pub(super) const STACK: Crate = Crate {
    name: "stack",
    root: "stack/src/lib.rs",
    units: &[
        // The constants that could be others. They are values alone.
        Unit { name: "tuning", modules: &["tuning"], uses: &[], tests: Tests::AsCode },
        Unit {
            name: "types",
            modules: &["types", "stats", "ids"],
            uses: &[],
            tests: Tests::AsCode,
        },
        Unit { name: "wire", modules: &["wire"], uses: &["types"], tests: Tests::AsCode },
        Unit { name: "timer", modules: &["timer"], uses: &["types"], tests: Tests::AsCode },
        Unit { name: "allowance", modules: &["allowance"], uses: &["types"], tests: Tests::AsCode },
        Unit { name: "memory", modules: &["mem"], uses: &["types"], tests: Tests::AsCode },
        Unit { name: "verbs", modules: &["verbs"], uses: &["types", "memory"], tests: Tests::All },
        Unit {
            name: "ingress",
            modules: &["ingress"],
            uses: &["tuning", "types", "wire"],
            tests: Tests::All,
        },
        Unit {
            name: "events",
            modules: &["events"],
            uses: &["types", "verbs"],
            tests: Tests::AsCode,
        },
        Unit { name: "sink", modules: &["sink"], uses: &["wire"], tests: Tests::AsCode },
        Unit {
            name: "credit",
            modules: &["peer", "pacer"],
            uses: &["tuning", "types"],
            tests: Tests::AsCode,
        },
        Unit {
            name: "cm",
            modules: &["cm"],
            uses: &["tuning", "types", "wire"],
            tests: Tests::All,
        },
        Unit {
            name: "recognition",
            modules: &["recognition"],
            uses: &["tuning", "types", "wire", "allowance", "cm"],
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
                "tuning",
                "types",
                "wire",
                "timer",
                "memory",
                "verbs",
                "ingress",
                "events",
                "sink",
                "credit",
                "cm",
                "handles",
                "recognition",
            ],
            tests: Tests::All,
        },
        // Roles return and do not call each other: neither of these knows the requester.
        Unit {
            name: "completer",
            modules: &["rc::completer"],
            uses: &["types", "wire", "verbs"],
            tests: Tests::All,
        },
        Unit {
            name: "responder",
            modules: &["rc::responder"],
            uses: &["types", "wire", "memory", "queues"],
            tests: Tests::All,
        },
        Unit {
            name: "rc",
            modules: &["rc"],
            uses: &[
                "tuning",
                "types",
                "wire",
                "memory",
                "verbs",
                "ingress",
                "sink",
                "credit",
                "queues",
                "recognition",
                "completer",
                "responder",
            ],
            tests: Tests::All,
        },
        // It asks the requester whether a packet may leave, as reliable connections do.
        Unit {
            name: "unreliable",
            modules: &["unreliable"],
            uses: &[
                "tuning", "types", "wire", "memory", "verbs", "ingress", "sink", "credit",
                "queues", "rc",
            ],
            tests: Tests::All,
        },
        Unit {
            name: "engine",
            modules: &["engine", "any", "groups", "gsi", "footprint"],
            uses: &[
                "tuning",
                "types",
                "wire",
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
