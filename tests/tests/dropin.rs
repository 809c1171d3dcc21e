//! The core of `cargo xtask dropin`: programs of rdma-core and perftest, unmodified, between two
//! containers, and the tests of rdma-core that tell soonest what is broken.

use std::path::Path;

use rocinante_dropin::install::Installation;
use rocinante_dropin::suite::{self, Verdict};
use rocinante_dropin::{row, table};
use rocinante_tests::{need, skip};

/// Program, mode and backend of rows of the table.
const CORE: [(&str, &str, &str); 10] = [
    ("ibv_devices", "", "udp"),
    ("ibv_devinfo", "-v", "udp"),
    ("ibv_rc_pingpong", "-c", "udp"),
    ("ibv_rc_pingpong", "-e -N -c", "packet"),
    ("ibv_uc_pingpong", "-e -c", "udp"),
    ("ibv_ud_pingpong", "-e -c", "udp"),
    ("ibv_srq_pingpong", "-e -c", "udp"),
    ("ib_send_bw", "-r 512 --use-srq", "udp"),
    ("ib_write_bw", "-q 4", "packet"),
    ("ib_read_lat", "", "udp"),
];

const TESTS: [&str; 6] = [
    "test_addr.AHTest.test_create_ah_roce",
    "test_cq_events.CqEventsTestCase.test_cq_events_rc",
    "test_qp.QPTest.test_query_rc_qp",
    "test_qpex.QpExTestCase.test_qp_ex_rc_rdma_read",
    "test_qpex.QpExTestCase.test_qp_ex_rc_send_imm",
    "test_qpex.QpExTestCase.test_qp_ex_ud_send",
];

/// What cargo builds for the tests of the libraries lies beside this program.
fn installed() -> Result<Installation, String> {
    need::machine_root()?;
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let built = own.parent().unwrap_or(Path::new("."));
    Installation::of(Path::new(env!("CARGO_BIN_EXE_rocinante-under-test")), built)
        .map_err(|error| format!("{error}: test -p rocinante-capi -p rocinante-paths, too"))
}

fn is_there(program: &str) -> bool {
    Path::new("/usr/bin").join(program).exists()
}

#[test]
fn programs_run_unmodified() {
    if !is_there("ibv_rc_pingpong") || !is_there("ib_write_bw") {
        skip!("no programs: apt install ibverbs-utils perftest");
    }
    let installed = match installed() {
        Ok(installed) => installed,
        Err(why) => skip!("{why}"),
    };
    let rows = table::rows();
    for core in CORE {
        let row = rows.iter().find(|row| (row.program, row.mode, row.netdev) == core).unwrap();
        let outcome = row::run(*row, &installed);
        assert_eq!(outcome.result, Ok(()), "{}", outcome.line());
    }
}

#[test]
fn tests_of_rdma_core_pass() {
    if !Path::new(suite::TESTS).is_dir() {
        skip!("no suite: apt install rdma-core python3-pyverbs");
    }
    let installed = match installed() {
        Ok(installed) => installed,
        Err(why) => skip!("{why}"),
    };
    let mut ended = Vec::new();
    suite::run(&TESTS, &installed, |name, verdict| {
        assert_eq!(verdict, &Verdict::Passed, "{name}");
        ended.push(name.to_owned());
    })
    .unwrap();
    assert_eq!(ended, TESTS);
}
