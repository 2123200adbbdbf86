//! `skysail bench sign`: certificates that the authority of the control plane signs per second, without the network.
//! Measures the work between the arrival of a call and its response, on any number of threads.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use skysail_core::{SpiffeId, names::TOKEN_AUDIENCE, stdio};
use skysail_identity::{Authority, Csr, Issuer, KeyAndCsr, ServiceAccount, Verifier};

use crate::foreign_load;

const LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Number of calls between two readings of the clock.
const CALLS_PER_READING: u32 = 16;

/// Settings of `skysail bench sign`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SignArgs {
    /// Threads that sign. Default: the number of CPUs.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Duration of each measurement.
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    seconds: u64,
}

/// Input of a call.
struct SigningInput {
    authority: Authority,
    verifier: Verifier,
    token: String,
    csr: String,
    id: SpiffeId,
}

impl SigningInput {
    fn new() -> anyhow::Result<Self> {
        let issuer = Issuer::generate()?;
        let id = SpiffeId::new("cluster.local", "default", "reviews");
        let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod: None };
        Ok(Self {
            authority: Authority::ephemeral()?,
            verifier: Verifier::from_pem(issuer.public_pem().as_bytes(), TOKEN_AUDIENCE)?,
            token: issuer.issue(&account, TOKEN_AUDIENCE, LIFETIME)?,
            csr: KeyAndCsr::generate(Some(&id))?.csr_pem,
            id,
        })
    }

    fn token(&self) -> anyhow::Result<()> {
        self.verifier.verify(&self.token)?;
        Ok(())
    }

    fn request(&self) -> anyhow::Result<Csr> {
        let csr = Csr::from_pem(&self.csr)?;
        csr.names_only(&self.id, &[])?;
        Ok(csr)
    }

    fn all(&self) -> anyhow::Result<()> {
        self.token()?;
        self.authority.issue(&self.request()?, &self.id, LIFETIME, None)?;
        Ok(())
    }
}

/// Measures each part on one thread, and the whole on all threads.
pub(crate) fn run(args: &SignArgs) -> anyhow::Result<bool> {
    let threads = match args.threads {
        Some(threads) => threads.max(1),
        None => thread::available_parallelism().context("counting CPUs")?.get(),
    };
    foreign_load::observe();
    let length = Duration::from_secs(args.seconds.max(1));
    let setting = &SigningInput::new()?;
    let csr = setting.request()?;
    let sign = || Ok(setting.authority.issue(&csr, &setting.id, LIFETIME, None).map(drop)?);
    print("verifying a token (ES256), 1 thread", rate(length, || setting.token())?)?;
    print("checking a request (P-256), 1 thread", rate(length, || setting.request().map(drop))?)?;
    print("signing (P-256), 1 thread", rate(length, sign)?)?;
    print("all of it, 1 thread", rate(length, || setting.all())?)?;
    let rates = thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(move || rate(length, || setting.all()))).collect();
        all.into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
            .sum::<anyhow::Result<f64>>()
    })?;
    print(&format!("all of it, {threads} threads"), rates)?;
    Ok(true)
}

/// Returns how often per second `what` runs.
fn rate(length: Duration, mut what: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < length {
        for _ in 0..CALLS_PER_READING {
            what()?;
        }
        done += CALLS_PER_READING;
    }
    Ok(f64::from(done) / start.elapsed().as_secs_f64())
}

fn print(what: &str, rate: f64) -> anyhow::Result<()> {
    Ok(stdio::print(line(what, rate))?)
}

fn line(what: &str, rate: f64) -> String {
    format!("{what:40} {rate:8.0} per second, {:6.1} µs each", 1e6 / rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_a_terminal() {
        let text = line("all of it, 1024 threads", 123_456.0);
        crate::layout::assert_fits(&text);
        assert_eq!(text, "all of it, 1024 threads                    123456 per second,    8.1 µs each");
    }
}
