//! Scenarios with real Kubernetes: its own etcd, API server, scheduler, kubelet and containerd, as
//! they lie in a folder or on the PATH, of any version.
//!
//! `cargo xtask kubernetes --bin DIR [--seeds N] [SCENARIO...]` runs it, as root. No component is
//! replaced by a double. Nodes other than the one with a kubelet are objects alone, and the program
//! sets the phases of their pods. A scenario that the version cannot have is a visible skip.
//!
//! All of it runs in namespaces of its own for network, mounts and processes, so that they end with
//! it. The containers' empty cgroups are removed.

#[path = "../extender/audit.rs"]
mod audit;
mod control;
mod manifests;
mod node;
mod parts;
mod storm;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use clap::Parser;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;

use self::parts::{Binaries, Cluster};

/// Says that the namespaces are there.
const INSIDE: &str = "ROCINANTE_KUBE_CLUSTER_INSIDE";
/// Where the tools of Kubernetes' API look for binaries.
const ASSETS: &str = "KUBEBUILDER_ASSETS";

#[derive(Parser)]
struct Arguments {
    /// The folder of kube-apiserver and the others. Those that it lacks are looked for on the PATH.
    #[arg(long, env = ASSETS)]
    bin: Option<PathBuf>,
    /// Storms, each with a seed of its own.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// The first storm's seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Also the scenario of 300 nodes and 3,000 pods, which takes minutes.
    #[arg(long)]
    large: bool,
    /// Only the scenarios whose names have one of these words.
    names: Vec<String>,
}

/// How a scenario ends: `Err` has the reason of a failure.
type Done = Result<(), String>;

/// A scenario, alone in a cluster without nodes and pods.
struct Scenario {
    name: &'static str,
    needs: &'static [&'static str],
    run: for<'a> fn(&'a mut Cluster, &'a Arguments) -> LocalBoxFuture<'a, Done>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let binaries = match Binaries::find(arguments.bin.as_deref()) {
        Ok(binaries) => binaries,
        Err(missing) => {
            println!(
                "SKIPPED cluster: no {missing}: `cargo xtask kubernetes --bin DIR`, or {ASSETS}"
            );
            println!("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
            return ExitCode::SUCCESS;
        }
    };
    if std::env::var_os(INSIDE).is_none() {
        let own = std::env::current_exe().expect("/proc is there");
        let mut inside = Command::new("unshare");
        inside.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        let done = inside.arg(own).args(std::env::args_os().skip(1)).env(INSIDE, "1").status();
        let cgroups = "/sys/fs/cgroup -depth -type d -path */k8s.io* -exec rmdir {} ;";
        let mut remove = Command::new("find");
        // Those of other containers are not empty.
        let _ = remove.args(cgroups.split(' ')).stderr(Stdio::null()).status();
        return match done {
            Ok(status) if status.success() => ExitCode::SUCCESS,
            done => {
                println!("unshare: {done:?}");
                ExitCode::FAILURE
            }
        };
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(run(&arguments, binaries))
}

async fn run(arguments: &Arguments, binaries: Binaries) -> ExitCode {
    println!("{}", binaries.versions());
    let all: Vec<&Scenario> = control::ALL.iter().chain(manifests::ALL).chain(node::ALL).collect();
    let is_chosen = |name: &str| {
        arguments.names.is_empty() || arguments.names.iter().any(|word| name.contains(word))
    };
    let (mut passed, mut failed, mut absent) = (0, 0, 0);
    for scenario in all.into_iter().filter(|it| is_chosen(it.name)) {
        if let Some(missing) = scenario.needs.iter().find(|it| !binaries.has(it)) {
            absent += 1;
            println!("SKIPPED cluster::{}: no {missing}", scenario.name);
            continue;
        }
        let start = Instant::now();
        let done = match Cluster::start(&binaries).await {
            Ok(mut cluster) => {
                let done = (scenario.run)(&mut cluster, arguments).boxed_local().await;
                done.map_err(|why| format!("{why}\n{}", cluster.words()))
            }
            Err(why) => Err(why),
        };
        let took = start.elapsed().as_secs_f64();
        let verdict = if done.is_ok() { "ok" } else { "FAILED" };
        println!("test {} ... {verdict} ({took:.1} s)", scenario.name);
        match done {
            Ok(()) => passed += 1,
            Err(why) => {
                println!("{why}");
                failed += 1;
            }
        }
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {verdict}. {passed} passed; {failed} failed; 0 ignored; 0 measured; {absent} filtered out"
    );
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
