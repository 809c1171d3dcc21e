//! Of `core.rs`: here because the models compile that file without its surroundings.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rocinante_netdev::AnyPort;
use rocinante_netdev::sim::{SimConfig, SimNet};
use rocinante_stack::{Engine, EngineConfig};

use super::core::{Core, HELD_ONLY};
use super::host::Host;
use super::shard::Shard;

fn core() -> Core {
    let port = SimNet::new(1).port(&[[10, 0, 0, 1].into()], &SimConfig::default()).unwrap();
    let engine = Engine::new(EngineConfig::default());
    Core::new(Shard::new(engine, AnyPort::from(port), Host::new(1))).unwrap()
}

/// The program may not call again for long, and the peer waits.
#[test]
fn who_stands_aside_for_longer_wakes_for_an_acknowledgement_that_is_held() {
    const NEVER: Duration = Duration::from_secs(20);
    let core = core();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let start = Instant::now();
            core.stand_aside(NEVER, core.epoch.load(Ordering::Relaxed));
            start.elapsed()
        });
        while core.parked_until.load(Ordering::Relaxed) != HELD_ONLY && !sleeper.is_finished() {
            std::thread::yield_now();
        }
        // What is not held may wait.
        let mut shard = core.shard.lock();
        core.touch();
        core.release(shard);
        assert_eq!(core.parked_until.load(Ordering::Relaxed), HELD_ONLY);
        shard = core.shard.lock();
        shard.held = true;
        core.release(shard);
        assert!(sleeper.join().unwrap() < NEVER);
    });
    // Who was faster than the sleep is noticed, too.
    let start = Instant::now();
    core.stand_aside(NEVER, core.epoch.load(Ordering::Relaxed).wrapping_sub(1));
    assert!(start.elapsed() < NEVER);
}
