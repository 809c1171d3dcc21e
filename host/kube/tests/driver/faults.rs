//! The driver of dynamic resource allocation when something ends, is away, or is full.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::json;

use crate::dra::{Shared, UID};
use crate::folder::names;
use crate::process::Process;
use crate::until;

#[tokio::test]
async fn of_two_drivers_either_may_end() {
    let (it, agent, first) = Shared::running().await;
    it.api().has_claim("c", UID, &["p"]);
    it.manager.prepare("p", (UID, "c")).await.unwrap();
    let version = it.slice().unwrap()["metadata"]["resourceVersion"].clone();
    let mut last = first;
    for nth in 0..4 {
        let next = it.driver(&format!("next-{nth}"));
        it.registered(2).await;
        // Both are called, in turn, of the one state.
        let uid = format!("u-{nth}");
        it.api().has_claim(&uid, &uid, &["p"]);
        it.manager.call_prepare(&[(&uid, &uid)]).await.unwrap()[&uid].as_ref().unwrap();
        // The old one ends, or the new one.
        drop(if nth % 2 == 0 { std::mem::replace(&mut last, next) } else { next });
        it.registered(1).await;
        until("it is called", async || it.manager.call_unprepare(&[(&uid, &uid)]).await.is_ok())
            .await;
        assert_eq!(agent.claims().keys().collect::<Vec<_>>(), [UID]);
    }
    assert_eq!(it.slice().unwrap()["metadata"]["resourceVersion"], version);
    // The one that is left keeps it.
    agent.has_uplinks(&[25]);
    until("it is kept", async || it.devices()[0]["capacity"]["egress"]["value"] == "25G").await;
    drop(last);
    it.registered(0).await;
    assert!(it.slice().is_some());
    assert_eq!(names(&it.manager.registry), [""; 0]);
}

#[tokio::test]
async fn a_driver_that_was_killed_between_two_steps_is_mended() {
    let (it, agent, driver) = Shared::running().await;
    it.api().has_claim("c", UID, &["p"]);
    it.manager.prepare("p", (UID, "c")).await.unwrap();
    let (state, claims) = (std::fs::read(it.state()).unwrap(), agent.claims());
    let file = it.node.folder.at("cdi").join(format!("rocinante.dev-claim_{UID}.json"));
    let cdi = std::fs::read(&file).unwrap();
    drop(driver);
    // Each of state, file of CDI and agent's claim may be there or not.
    for (nth, is_there) in (0..8).map(|n| (n, [n & 1 > 0, n & 2 > 0, n & 4 > 0])) {
        for is_claim_there in [true, false] {
            if is_claim_there {
                it.api().has_claim("c", UID, &["p"]);
            } else {
                it.api().delete_claim("c");
            }
            let [has_state, has_cdi, has_claim] = is_there;
            let _ = std::fs::remove_file(it.state());
            let _ = std::fs::remove_file(&file);
            // A file that was cut is none.
            std::fs::write(it.state(), if has_state { &state[..] } else { &state[..9] }).unwrap();
            if has_cdi {
                std::fs::write(&file, &cdi).unwrap();
            }
            agent.has_claims(if has_claim { claims.clone() } else { BTreeMap::new() });
            let _driver = it.driver("b");
            // Without a file that says which claim it is the kubelet has to ask.
            let stays = is_claim_there && (has_state || has_cdi);
            let wanted = if stays { vec![UID.to_owned()] } else { Vec::new() };
            until(&format!("{nth} {is_claim_there}"), async || {
                let (files, known) = it.left();
                files.len() == wanted.len()
                    && known == wanted
                    && agent.claims().into_keys().collect::<Vec<_>>() == wanted
            })
            .await;
            it.registered(1).await;
            if is_claim_there {
                // A connection with the driver before may be there, and end.
                until("it is called", async || {
                    let answer = it.manager.call_prepare(&[(UID, "c")]).await;
                    answer.is_ok_and(|it| it[UID].is_ok())
                })
                .await;
                assert_eq!(
                    (std::fs::read(&file).unwrap(), agent.claims()),
                    (cdi.clone(), claims.clone())
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_leaves_its_sockets_and_claims_to_the_next_one() {
    let it = Shared::new().await;
    let agent = it.node.agent(&[10]);
    it.manager.start();
    it.api().has_claim("c", UID, &["p"]);
    for uid in ["a", "b", "a"] {
        let options = ["--accounting", "dra", "--pod-uid", uid];
        let process = Process::start_with(&it.node, "0.02", &options);
        let socket = format!("rocinante.dev-{uid}-reg.sock");
        // That of the one before goes.
        until("it is alone", async || it.manager.plugins() == [&*socket]).await;
        until("it is called", async || it.manager.prepare("p", (UID, "c")).await.is_ok()).await;
        until("the slice", async || it.generation() == Some(1)).await;
        assert_eq!((agent.claims().len(), it.left().1), (1, vec![UID.to_owned()]));
        // SIGKILL.
        drop(process);
        assert_eq!(names(&it.manager.registry), [socket]);
        it.manager.start();
    }
}

#[tokio::test]
async fn the_api_server_may_be_away_or_slow() {
    let it = Shared::with_latency(Duration::from_millis(100)).await;
    it.api().away(true);
    let (agent, _driver) = (it.node.agent(&[10]), it.driver("a"));
    it.manager.start();
    it.registered(1).await;
    it.api().has_claim("c", UID, &["p"]);
    let prepared =
        async || it.manager.call_prepare(&[(UID, "c")]).await.unwrap().remove(UID).unwrap();
    assert!(prepared().await.unwrap_err().contains("no answer from the API server"));
    it.api().away(false);
    until("the slice", async || it.generation() == Some(1)).await;
    for code in [409, 410, 429, 500, 504].map(|it| StatusCode::from_u16(it).unwrap()) {
        // The watches may meet one.
        it.api().fail_resources([code]);
        let why = prepared().await;
        assert!(why.is_err() || !it.api().has_resource_faults(), "{code}: {why:?}");
        until("it is prepared", async || prepared().await.is_ok()).await;
        assert!(agent.claims().contains_key(UID));
        it.manager.call_unprepare(&[(UID, "c")]).await.unwrap();
    }
    // Slices: conflicts, and watches that end or are too old.
    let codes = [StatusCode::CONFLICT, StatusCode::GONE, StatusCode::SERVICE_UNAVAILABLE];
    it.api().fail_resources(codes);
    agent.has_uplinks(&[25]);
    until("25G", async || it.devices()[0]["capacity"]["egress"]["value"] == "25G").await;
    it.api().forget_history();
    it.api().wipe_slices();
    until("again", async || it.devices().len() == 1).await;
    it.api().cut_watches(1);
    it.api().wipe_slices();
    until("after a watch that was cut", async || it.devices().len() == 1).await;
    // Another process makes a slice of ours, and changes this one.
    let mut other = it.slice().unwrap();
    other["metadata"]["name"] = "n1-other".into();
    it.api().put_slice(other);
    until("it goes", async || it.api().slices().len() == 1).await;
    let mut changed = it.slice().unwrap();
    changed["spec"]["devices"] = json!([]);
    it.api().put_slice(changed);
    until("it is mended", async || it.devices().len() == 1).await;
    // One that goes before it is deleted.
    let mut other = it.slice().unwrap();
    other["metadata"]["name"] = "n1-other".into();
    it.api().put_lost_slice(other);
    agent.has_uplinks(&[50]);
    let is_ours = |it: &serde_json::Value| it["metadata"]["name"] == "n1-rocinante.dev";
    until("50G", async || {
        let slice = it.api().slices().into_iter().find(is_ours).unwrap();
        slice["spec"]["devices"][0]["capacity"]["egress"]["value"] == "50G"
    })
    .await;
}

#[tokio::test]
async fn a_state_of_another_version_stays() {
    let (it, agent, _driver) = Shared::running().await;
    let newer = r#"{"version":2,"claims":["of another kind"]}"#;
    std::fs::write(it.state(), newer).unwrap();
    it.api().has_claim("c", UID, &["p"]);
    let answer = it.manager.call_prepare(&[(UID, "c")]).await.unwrap();
    let why = answer[UID].as_ref().unwrap_err();
    assert!(why.contains("has version 2, not 1"), "{why}");
    assert_eq!(std::fs::read_to_string(it.state()).unwrap(), newer);
    assert!(agent.claims().is_empty());
    // A driver that is killed while it writes leaves this.
    std::fs::remove_file(it.state()).unwrap();
    it.manager.call_prepare(&[(UID, "c")]).await.unwrap()[UID].as_ref().unwrap();
    let cut = it.node.folder.at("cdi").join(format!("rocinante.dev-claim_{UID}.new"));
    std::fs::write(&cut, "{").unwrap();
    it.manager.call_unprepare(&[(UID, "c")]).await.unwrap();
    assert!(it.has_nothing() && !cut.exists());
}

#[tokio::test]
async fn a_disk_that_is_full_fails_the_claim_alone() {
    let (it, agent, _driver) = Shared::running().await;
    it.api().has_claim("c", UID, &["p"]);
    let prepared =
        async || it.manager.call_prepare(&[(UID, "c")]).await.unwrap().remove(UID).unwrap();
    // Folders in the place of the files that are written.
    let file = it.node.folder.at("cdi").join(format!("rocinante.dev-claim_{UID}.new"));
    for (path, says) in [(file, "the file of CDI"), (it.state().with_extension("new"), "the state")]
    {
        std::fs::create_dir(&path).unwrap();
        let why = prepared().await.unwrap_err();
        assert!(why.contains(says), "{why}");
        std::fs::remove_dir(&path).unwrap();
        assert!(it.has_nothing() && agent.claims().is_empty());
    }
    prepared().await.unwrap();
}

/// In a process of its own, whose descriptors it counts.
#[test]
fn a_thousand_pods_leave_nothing() {
    const ALONE: &str = "ROCINANTE_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "faults::a_thousand_pods_leave_nothing", "--nocapture"]);
        // Both count the tests that they run.
        let done = alone.env(ALONE, "1").stdout(std::io::stderr()).status().unwrap();
        return assert!(done.success(), "alone: {done}");
    }
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    threads.worker_threads(2).enable_all().build().unwrap().block_on(thousand_pods());
}

async fn thousand_pods() {
    let (it, agent, _driver) = Shared::running().await;
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let mut random = fastrand::Rng::with_seed(37);
    for round in 0..50 {
        let uids: Vec<String> = (0..20).map(|nth| format!("u-{round}-{nth}")).collect();
        for uid in &uids {
            it.api().has_claim(uid, uid, &[uid]);
        }
        let each = uids.iter().map(|uid| it.manager.prepare(uid, (uid, uid)));
        for prepared in futures_util::future::join_all(each).await {
            prepared.unwrap();
        }
        assert_eq!(agent.claims().len(), 20);
        // Some are deleted by force, before the kubelet knows.
        for uid in uids.iter().filter(|_| random.bool()) {
            it.api().delete_claim(uid);
        }
        let each = uids.iter().map(|uid| it.manager.unprepare(uid, uid));
        for unprepared in futures_util::future::join_all(each).await {
            unprepared.unwrap();
        }
        assert!(agent.claims().is_empty() && it.has_nothing(), "{round}");
        uids.iter().for_each(|uid| it.api().delete_claim(uid));
    }
    assert_eq!(names(&it.node.folder.at("cdi")), [""; 0]);
    let files = names(&it.node.folder.at("kubelet/plugins/rocinante.dev"));
    assert_eq!(files, ["dra-a.sock", "keeper", "lock", "state.json"]);
    // Both ends of the connections that twenty requests at a time leave open to the API server.
    until("no descriptor is left", async || open() <= before + 2 * 20 + 8).await;
}
