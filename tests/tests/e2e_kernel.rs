//! The tests of the API on a device of the kernel, such as a ConnectX, run as a user with access to
//! it:
//!
//! `ROCINANTE_TEST_DEVICE=mlx5_0 ROCINANTE_TEST_ADDRESS=10.0.0.5
//! cargo test -p rocinante-tests --test e2e_kernel -- [--list] [FILTER…]`
//!
//! Without these variables there is nothing to run. `cargo xtask interop hardware::verbs` runs the
//! same tests on Soft-RoCE, in a virtual machine.

use std::process::ExitCode;
use std::time::Instant;

use rocinante_tests::harness::{ADDRESS_VARIABLE, DEVICE_VARIABLE, KernelDevice, On};
use rocinante_tests::verbs::{TESTS, Test, death};

fn main() -> ExitCode {
    death::be_the_peer_if_asked();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let chosen = |test: &&Test| filters.iter().all(|part| test.name.contains(*part));
    let tests: Vec<&Test> = TESTS.iter().filter(chosen).collect();
    if args.iter().any(|arg| arg == "--list") {
        tests.iter().for_each(|test| println!("{}: test", test.name));
        return ExitCode::SUCCESS;
    }
    match KernelDevice::from_environment() {
        Ok(Some(device)) => run(&tests, &device),
        Ok(None) => {
            println!(
                "no device of the kernel's was named ({DEVICE_VARIABLE}, {ADDRESS_VARIABLE}): these tests run on Soft-RoCE by \
                 `cargo xtask interop hardware::verbs`"
            );
            println!(
                "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; {} filtered out",
                TESTS.len()
            );
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("{why}");
            println!(
                "test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out"
            );
            ExitCode::FAILURE
        }
    }
}

/// One after the other, because they share the device's counters.
fn run(tests: &[&Test], device: &KernelDevice) -> ExitCode {
    println!("running {} tests on {} with {}", tests.len(), device.name, device.address);
    let start = Instant::now();
    let failed = tests.iter().filter(|test| {
        let result = test.run(On::Kernel(device.clone()));
        println!("test {} ... {}", test.name, if result.is_ok() { "ok" } else { "FAILED" });
        result.is_err()
    });
    let failed = failed.count();
    println!(
        "test result: {}. {} passed; {failed} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s",
        if failed == 0 { "ok" } else { "FAILED" },
        tests.len() - failed,
        TESTS.len() - tests.len(),
        start.elapsed().as_secs_f64()
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
