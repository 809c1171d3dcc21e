//! The project's chores. A bare machine needs nothing but cargo and a linker: `cargo xtask demo`
//! and `cargo xtask test` do all the set-up they need.
#![forbid(unsafe_code)]

mod api;
mod command;
mod debs;
mod demo;
mod deny;
mod dist;
mod dropin;
mod files;
mod foreign;
mod fuzz;
mod images;
mod instructions;
mod interop;
mod machine;
mod memory;
mod mutants;
mod nursery;
mod orderings;
mod policies;
mod pool;
mod programs;
mod prose;
mod publish;
mod sbom;
mod setup;
mod skips;
mod soak;
mod test;
mod toolchain;
mod unsafe_files;

use crate::command::cargo;
use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
cargo xtask COMMAND

  demo [ARGS]          set up the machine, build, and run `rocinante demo ARGS`
  bench [ARGS]         build and run `rocinante-bench ARGS`: measure everything (as root)
  test [--quick]       set up the machine, and run every check and every test; --quick leaves out
                       cargo-deny, miri, the instructions, cargo-fuzz, the demo, and the tests that take longest
  test --only STEP...  only these steps, such as clippy, tests, miri
  fuzz [SECONDS] [TARGET...]
                       each fuzz target under cargo-fuzz for so long (10 s)
  mutants PART [ARGS]  change stack, netdev or verbs-api in every way that cargo-mutants knows (ARGS are its own,
                       such as --shard 3/40), and say which changes no test notices: docs/proof.md
  orderings [--find] [NAME...]
                       take away each fence, memory ordering and check of what threads share, or those with such a name, one at a time:
                       the model that docs/orderings.md names has to notice; --find looks for one
  instructions [--update]
                       compare how many instructions the engine needs for an operation with benches/instructions.json, or write that anew
  policies [--rows GROUPS] [NAME...]
                       build rocinante-bench with and without each policy of the files tuning.rs, run both in turns (as root), and
                       print a table of what each gives and costs: docs/performance/method.md
  interop [--subset] [FILTER...]
                       boot a virtual machine with Linux Soft-RoCE, and run the matrix of what we do with it: all of it,
                       or the part that `test` runs; only cells with every FILTER in their names
                       (--list names them, --times=N repeats them, --write-subset chooses that part anew)
  interop bench [ARGS] in that machine, `rocinante-bench ARGS` beside Soft-RoCE
  interop agent [ADDRESS:PORT]
                       on a machine with an RDMA device of the kernel's: let others try it
  interop --device NAME [--agent HOST|local] [--ours ADDRESS] ...
                       the whole matrix with such a device, and a report; `interop --device NAME --help` says more
  dropin [--json] [--accept] [WORD...]
                       run the programs of docs/dropin.md unmodified, each between two network namespaces (as root): all, or rows with
                       each WORD in program, mode and backend; --accept writes the table anew
  dropin --suite [--json] [WORD...], dropin --transports DIR
                       rdma-core's own tests on a device in software; programs over this project and over TCP
  dropin --foreign PROCESSOR [--json] [WORD...]
                       programs for another processor by its emulator, such as aarch64: with each other, and with those for this one
  dropin --kills [--json] [BACKEND]
                       20 rounds of 32 pairs of ibv_rc_pingpong on one pair of addresses, a third of them killed, on udp or BACKEND
  containers           containers of podman, Docker and containerd by the files of examples/containers (as root)
  kubernetes --bin DIR [--seeds N] [SCENARIO...]
                       scenarios with real Kubernetes, whose programs lie in DIR or on the PATH (as root); --help says more
  soak [--hogs N] [SECONDS [BACKEND]]
                       every operation compared byte for byte while packets are lost, the network changes and peers are killed: for ten
                       minutes, or so long, on each backend, or on udp, packet or afxdp (as root, with network namespaces);
                       with --hogs, connections with default options beside N busy loops in the place of that
  miri                 the engine, the rings and small devices under miri; needs a nightly toolchain with it
  sanitize WHICH       tests under a sanitizer: netdev, verbs-api and, under address, end to end; address or thread; needs a nightly toolchain
                       with rust-src
  api [--accept]       compare the public API of the crate rocinante with docs/api.txt, or write that anew
  man DIR              a man page for each command, from the definition of the command line
  dist [PROCESSOR...]  what others take away, below cli/dist/out: static programs for x86_64 and aarch64, or one of them,
                       Debian packages, OCI images, completions, man pages, checksums, bill of materials
  setup                only set up the machine
";

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace");
    let from = std::env::current_dir().unwrap_or_else(|_| root.to_path_buf());
    if let Err(error) = std::env::set_current_dir(root) {
        eprintln!("xtask: {}: {error}", root.display());
        return ExitCode::FAILURE;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.split_first() {
        Some((&"demo", rest)) => demo::run(rest),
        Some((&"bench", rest)) => bench(rest, &from),
        Some((&"test", [])) => test::run(test::Scope::All),
        Some((&"test", ["--quick"])) => test::run(test::Scope::Quick),
        Some((&"test", ["--only", steps @ ..])) if !steps.is_empty() => {
            test::run(test::Scope::Only(steps))
        }
        Some((&"fuzz", rest)) => fuzz::run(rest),
        Some((&"instructions", rest)) => instructions::run(rest),
        Some((&"mutants", rest)) => mutants::run(rest),
        Some((&"policies", rest)) => policies::run(rest),
        Some((&"orderings", rest)) => orderings::run(rest),
        Some((&"interop", rest)) => interop::run(rest, &from),
        Some((&"dropin", rest)) => dropin::run(rest),
        Some((&"containers", [])) => containers(),
        Some((&"kubernetes", rest)) => kubernetes(rest, &from),
        Some((&"soak", rest)) => soak::run(rest),
        Some((&"miri", [])) => memory::miri(),
        Some((&"sanitize", [which])) => memory::sanitize(which),
        Some((&"setup", [])) => {
            setup::packages(setup::TESTS);
            setup::toolchain()
        }
        Some((&"api", rest)) => api::run(rest),
        Some((&"dist", processors)) => dist::run(processors),
        Some((&"man", [directory])) => dist::man(&from.join(directory)),
        Some((&("help" | "--help" | "-h"), _)) => {
            print!("{USAGE}");
            Ok(())
        }
        _ => Err(format!("what shall it be?\n\n{USAGE}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_empty() => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// `cargo xtask containers`: the engines that the machine lacks are installed before.
fn containers() -> Result<(), String> {
    setup::packages(&[setup::TESTS, setup::CONTAINERS].concat());
    let mut test = cargo("test -p rocinante-tests --test cli -- engines:: --nocapture");
    skips::none(test.args(["--test-threads", "1"]))
}

/// `cargo xtask kubernetes ARGS`. Folders among `args` are relative to the directory `from`.
fn kubernetes(args: &[&str], from: &Path) -> Result<(), String> {
    setup::packages(&[setup::TESTS, setup::CONTAINERS, &["etcd-server"]].concat());
    command::run(&mut cargo("build -q -p rocinante-agent -p rocinante-cni -p rocinante-cli"))?;
    let args = args.iter().map(|arg| match from.join(arg) {
        folder if folder.is_dir() => folder.into(),
        _ => std::ffi::OsString::from(arg),
    });
    command::run(cargo("test --quiet -p rocinante-kube --test cluster --").args(args))
}

/// `cargo xtask bench ARGS`, in the directory `from`.
fn bench(args: &[&str], from: &Path) -> Result<(), String> {
    setup::packages(setup::DEMO);
    command::run(&mut cargo("build --release --quiet -p rocinante-bench"))?;
    let program = demo::target()?.join("release/rocinante-bench");
    command::become_it(std::process::Command::new(program).args(args).current_dir(from))
}
