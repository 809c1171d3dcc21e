//! Waiting, for both test programs.

use std::time::Duration;

/// The bound of events that have to happen, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for an event that has no other announcement.
pub(crate) async fn until(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !happened().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"));
}
