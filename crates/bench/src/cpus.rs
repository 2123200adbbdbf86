//! Assigns CPUs, so that client and server take no CPU time from a proxy.

use anyhow::{Context as _, bail};
use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};

/// Returns one CPU for the proxy and all others for the rest.
///
/// # Errors
/// If there is only one CPU.
pub(crate) fn split() -> anyhow::Result<(CpuSet, CpuSet)> {
    let mut rest = sched_getaffinity(Pid::from_raw(0)).context("reading the CPU affinity")?;
    let there: Vec<usize> = (0..CpuSet::count()).filter(|cpu| rest.is_set(*cpu).unwrap_or(false)).collect();
    let Some(last) = there.last().filter(|_| there.len() > 1) else {
        bail!(
            "two CPUs are needed, and there is one: omit flat-out, http2, tcp, handshakes and overload (--only)"
        );
    };
    let mut proxy = CpuSet::new();
    proxy.set(*last)?;
    rest.unset(*last)?;
    Ok((proxy, rest))
}
