//! Memory windows, and regions registered anew.

use rocinante::SendWr;
use rocinante::verbs::{BindMw, MwPart, MwType, Rereg, SendData};

use super::super::proto::{Range, Remote};
use super::super::words::{access_of, text};
use super::{Mw, NO_REGION, Result, Verbs};

impl Verbs {
    pub(in crate::agent) fn rereg(
        &mut self,
        region: usize,
        access: Option<u32>,
        len: Option<usize>,
    ) -> Result<Remote> {
        let access = access.map(access_of).transpose()?;
        let region = self.regions.get_mut(region).and_then(Option::as_mut).ok_or(NO_REGION)?;
        region.rereg(&Rereg { pd: None, access, len }).map_err(text)?;
        Ok(Remote { address: region.address(), rkey: region.rkey().0 })
    }

    pub(in crate::agent) fn window(&mut self, mw_type: u8) -> Result<()> {
        let mw_type = if mw_type == 1 { MwType::Type1 } else { MwType::Type2 };
        let window = self.opened()?.pd.alloc_mw(mw_type).map_err(text)?;
        self.windows.push(Some(window));
        Ok(())
    }

    pub(in crate::agent) fn free_window(&mut self, window: usize) -> Result<()> {
        let window = self.windows.get_mut(window).and_then(Option::take);
        window.ok_or("no such window").map(Mw::dealloc).map_err(str::to_owned)
    }

    pub(in crate::agent) fn post_bind(
        &self,
        qp: usize,
        window: usize,
        range: Range,
        access: u32,
    ) -> Result<Remote> {
        let wr_id = 90;
        let qp = self.qp(qp)?;
        let mw = self.windows.get(window).and_then(Option::as_ref).ok_or("no such window")?;
        let mr = self.regions.get(range.region).and_then(Option::as_ref).ok_or(NO_REGION)?;
        let access = access_of(access)?;
        let part = MwPart { mr, offset: range.offset, len: range.len, access };
        match mw.mw_type() {
            MwType::Type1 => {
                let bind = BindMw { wr_id, part, signaled: true, fence: false };
                qp.bind_mw(mw, &bind).map_err(text)?;
            }
            MwType::Type2 => {
                let (op, data) = (mw.bind(&part), SendData::Sges(&[]));
                let wr = SendWr::new(op, data).wr_id(wr_id);
                qp.post_send(&[wr]).map_err(|error| error.to_string())?;
            }
        }
        Ok(Remote { address: part.address(), rkey: mw.rkey().0 })
    }
}
