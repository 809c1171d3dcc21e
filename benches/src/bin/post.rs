//! Does by the Rust API what `verbs-api/capi/cost/post.c` does by the C ABI: `cargo xtask
//! instructions` counts both. Posts WRITEs of 64 bytes and polls for their completions; the
//! argument is their number.
#![forbid(unsafe_code)]

use rocinante::device::Backend;
use rocinante::verbs::{Budget, SendData, SendOp};
use rocinante::{Access, ConnectOptions, Endpoint, OpenOptions, SendWr, Wc, WcStatus};
use std::time::Duration;

/// WRITEs in flight; divides the argument.
const BURST: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count: u64 = std::env::args().nth(1).ok_or("post COUNT")?.parse()?;
    let ctx = OpenOptions::new().netdev(Backend::Udp).open_interface("lo")?;
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64)?);
    let mr = pd.allocate(128, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let make = || pd.qp(&cq, &cq).access(Access::REMOTE_WRITE).max_send_wr(64).build();
    let (qp, peer) = (make()?, make()?);
    // As the C program's: of which nothing is known.
    let stranger = |end: Endpoint| {
        let mut end = end;
        (end.budget, end.queue) = (Budget::STANDARD, None);
        end
    };
    let ends = [qp.endpoint(), peer.endpoint()].map(stranger);
    let options = ConnectOptions::default().timeout(20);
    let (qp, _peer) = (qp.connect(&ends[1], &options)?, peer.connect(&ends[0], &options)?);
    let list = [mr.sge(0, 64)];
    let op = SendOp::Write { remote: mr.address() + 64, rkey: mr.rkey(), imm: None };
    mr.write(0, &[7; 64]);
    let rest = || std::thread::sleep(Duration::from_millis(20));
    for at in (0..count).step_by(BURST) {
        let burst = at..at + BURST as u64;
        for wr_id in burst.clone() {
            qp.post_send(&[SendWr::new(op, SendData::Sges(&list)).wr_id(wr_id)])?;
        }
        // The device's own thread completes them: no poll is in vain.
        rest();
        for wr_id in burst {
            let mut room = [Wc::default()];
            let wc = loop {
                if let [wc] = cq.poll(&mut room)? {
                    break *wc;
                }
                rest();
            };
            assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, wr_id));
        }
    }
    assert_eq!(mr.to_vec(64, 64), [7; 64]);
    Ok(())
}
