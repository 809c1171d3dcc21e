#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| (rocinante_tests::fuzz::target("reserved").run)(data));
