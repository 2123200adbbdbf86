//! Work for `skysail bench instructions`: verifies a token and a signing request, and signs a certificate, N times.
//!
//! ```text
//! cargo run --release -p skysail-identity --example certificate -- N
//! ```

use std::{error::Error, hint::black_box, time::Duration};

use skysail_core::{SpiffeId, names::TOKEN_AUDIENCE};
use skysail_identity::{Authority, Csr, Issuer, KeyAndCsr, ServiceAccount, Verifier};

const LIFETIME: Duration = Duration::from_secs(24 * 3600);

fn main() -> Result<(), Box<dyn Error>> {
    let times: u32 = std::env::args().nth(1).ok_or("usage: certificate N")?.parse()?;
    let issuer = Issuer::generate()?;
    let verifier = Verifier::from_pem(issuer.public_pem().as_bytes(), TOKEN_AUDIENCE)?;
    let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod: None };
    let token = issuer.issue(&account, TOKEN_AUDIENCE, LIFETIME)?;
    let id = SpiffeId::new("cluster.local", "default", "reviews");
    let (authority, request) = (Authority::ephemeral()?, KeyAndCsr::generate(Some(&id))?.csr_pem);
    for _ in 0..times {
        black_box(verifier.verify(&token)?);
        let csr = Csr::from_pem(&request)?;
        csr.names_only(&id, &[])?;
        black_box(authority.issue(&csr, &id, LIFETIME, None)?);
    }
    Ok(())
}
