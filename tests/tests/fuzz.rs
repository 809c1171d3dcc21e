//! The fuzz targets over their corpora, and over mutated copies of them. The copies are always the
//! same, so a failure repeats everywhere. `ROCINANTE_FUZZ_SEED=n` tries others;
//! `ROCINANTE_FUZZ_TIMES=k` multiplies their number by k.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rocinante_tests::fuzz::{self, Random, Target};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect(name))
}

/// Runs one input; a failure says how to repeat it.
fn try_one(target: &Target, what: &str, input: &[u8]) {
    let run = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    if run.is_err() {
        let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        panic!("{}, {what}: {hex}", target.name);
    }
}

fn smoke(name: &str) {
    let target = fuzz::target(name);
    let corpus = (target.corpus)();
    assert!(!corpus.is_empty());
    for (n, input) in corpus.iter().enumerate() {
        try_one(target, &format!("input {n} of the corpus"), input);
    }
    let seed = number("ROCINANTE_FUZZ_SEED").unwrap_or(1);
    let tries = u64::from(target.tries) * number("ROCINANTE_FUZZ_TIMES").unwrap_or(1);
    let mut random = Random::new(seed);
    for n in 0..tries {
        let input = random.changed(&corpus);
        try_one(target, &format!("seed {seed}, try {n}"), &input);
    }
    println!("{name}: {} inputs, {tries} changed ones", corpus.len());
}

macro_rules! targets {
    ($( $name:ident: $target:literal; )*) => {$(
        #[test]
        fn $name() {
            smoke($target);
        }
    )*};
}

targets! {
    packets_of_any_bytes: "packet";
    any_packets_at_a_live_queue_pair: "engine";
    any_sequence_of_calls: "api";
    any_datagrams_at_a_connection_manager: "cm";
    any_words_of_a_peer: "words";
    any_words_of_the_kernel: "kernel";
    any_capture: "decode";
    any_messages_between_a_program_and_an_agent: "handed";
    any_commands_to_an_agent: "commands";
    any_word_of_an_engine: "hook";
    any_words_in_a_page_of_counters: "page";
    any_commands_to_rdma_cm: "ucma";
    any_words_of_faults: "faults";
    any_words_of_reservations: "reserved";
}

#[test]
fn each_target_has_a_program_for_cargo_fuzz() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let manifest =
        std::fs::read_to_string(folder.join("Cargo.toml")).expect("tests/fuzz/Cargo.toml");
    for target in fuzz::TARGETS {
        let program = folder.join(format!("fuzz_targets/{}.rs", target.name));
        assert!(program.is_file(), "{}", program.display());
        assert!(manifest.contains(&format!("fuzz_targets/{}.rs", target.name)), "{}", target.name);
    }
}
