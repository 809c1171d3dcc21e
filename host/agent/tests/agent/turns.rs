//! Programs that ask at the same time, and wait for their turn.

use std::time::{Duration, Instant};

use rocinante_netdev::Backend;

use crate::asker::{Asker, eventually};
use crate::lab::host_or_skip;

/// Those of one container ask more often than it may; another container's come between.
#[test]
fn all_that_start_together_get_their_ports() {
    let mut host = host_or_skip!("turns::all_that_start_together", 2);
    host.configure("requests_per_second = 5\nring_frames_max = 15");
    host.start();
    let [v4, v6] = host.addresses(0);
    let mut herd: Vec<Asker> = (0..30).map(|_| host.asker(0)).collect();
    let mut other = host.asker(1);
    herd.iter_mut().chain([&mut other]).for_each(|asker| drop(asker.tell("rights")));
    let begun = Instant::now();
    herd.iter_mut().for_each(|asker| asker.say(&format!("wait-for {v4}")));
    for asker in &mut herd {
        let answer = asker.hear();
        assert!(answer.starts_with("refused Queued"), "{answer}");
    }
    other.granted(host.addresses(1)[0]);
    assert!(host.ports() < 31, "the other waits for none of them");
    herd.iter_mut().for_each(|asker| asker.say("hear-answer"));
    for asker in &mut herd {
        let answer = asker.hear();
        assert!(answer.starts_with("granted 1 "), "{answer}");
    }
    assert!(begun.elapsed() >= Duration::from_secs(5), "five at once, and five a second");
    assert_eq!(host.ports(), 31);
    // A program that does not wait is refused, as ever: at least one of thirty within five seconds.
    herd.iter_mut().for_each(|asker| asker.say(&format!("ask {v6}")));
    let answers: Vec<String> = herd.iter_mut().map(Asker::hear).collect();
    assert!(answers.iter().any(|answer| answer.contains("too often")), "{answers:?}");
    // And programs do wait.
    host.asker(0).opened(Backend::Packet, v6);
}

/// Two hundred programs of two containers, which may have a hundred ports each.
#[test]
fn two_hundred_of_two_containers_get_their_ports() {
    let mut host = host_or_skip!("turns::two_hundred_of_two_containers", 2);
    host.configure("ports_max = 100\nring_mib_total = 1024");
    host.start();
    let mut herd: Vec<Asker> = (0..200).map(|nth| host.asker(nth % 2)).collect();
    herd.iter_mut().for_each(|asker| drop(asker.tell("rights")));
    for (nth, asker) in herd.iter_mut().enumerate() {
        asker.say(&format!("wait-for {}", host.addresses(nth % 2)[0]));
    }
    for asker in &mut herd {
        let answer = asker.hear();
        assert!(answer.starts_with("refused Queued"), "{answer}");
        asker.say("hear-answer");
    }
    for asker in &mut herd {
        let answer = asker.hear();
        assert!(answer.starts_with("granted 1 "), "{answer}");
    }
    assert_eq!([host.slots(0).len(), host.slots(1).len()], [100, 100]);
}

#[test]
fn nothing_is_worked_for_a_program_that_gave_up() {
    let mut host = host_or_skip!("turns::nothing_is_worked", 1);
    host.configure("requests_per_second = 1");
    host.start();
    let [v4, _] = host.addresses(0);
    let (mut first, before) = (host.asker(0), host.descriptors());
    let mut others: Vec<Asker> = (0..11).map(|_| host.asker(0)).collect();
    others.iter_mut().for_each(|asker| drop(asker.tell("rights")));
    let begun = Instant::now();
    first.granted(v4);
    for asker in &mut others {
        // On a busy machine, the turn of one may have come.
        let answer = asker.tell(&format!("wait-for {v4}"));
        let words = ["refused Queued", "granted 1 "];
        assert!(words.iter().any(|word| answer.starts_with(word)), "{answer}");
    }
    let mut last = others.pop().expect("eleven");
    others.into_iter().for_each(Asker::kill);
    let answer = last.tell("hear-answer");
    assert!(answer.starts_with("granted 1 "), "{answer}");
    // With each of the ten before it, its turn would come after eleven seconds.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    host.has_ports(2);
    last.tell("close");
    first.tell("close");
    host.has_ports(0);
    eventually("no descriptor stays", || host.descriptors() <= before + 1);
}
