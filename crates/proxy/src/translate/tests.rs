//! Everything recorded from an istiod is taken; what is not supported is refused by name.

use std::{fs, io::Read as _, path::Path};

use super::*;

/// Prints what becomes of every recorded resource below a folder.
#[test]
fn survey() {
    let Ok(root) = std::env::var("XDS_SURVEY") else { return };
    let tls = TlsContexts::default();
    let translator = Translator { tls: &tls, strict: false };
    for scenario in fs::read_dir(root).unwrap() {
        let xds = scenario.unwrap().path().join("xds");
        let Ok(proxies) = fs::read_dir(&xds) else { continue };
        for proxy in proxies {
            let proxy = proxy.unwrap().path();
            for kind in ["cds", "eds", "lds", "rds"] {
                let Some(body) = gunzip(&proxy.join(format!("{kind}.sotw.pb.gz"))) else { continue };
                let response =
                    skysail_xds::envoy::pb::envoy::service::discovery::v3::DiscoveryResponse::decode(
                        body.as_slice(),
                    )
                    .unwrap();
                for any in response.resources {
                    let outcome = match kind {
                        "cds" => translator.cluster(&any.value).map(drop),
                        "lds" => translator.listener(&any.value).map(drop),
                        "rds" => translator.routes(&any.value).map(drop),
                        _ => Ok(()),
                    };
                    if let Err(reject) = outcome {
                        println!("{} {kind}: {reject}", proxy.display());
                    }
                }
            }
        }
    }
}

fn gunzip(path: &Path) -> Option<Vec<u8>> {
    let file = fs::File::open(path).ok()?;
    let output = std::process::Command::new("gzip").arg("-dc").stdin(file).output().ok()?;
    let mut bytes = Vec::new();
    output.stdout.as_slice().read_to_end(&mut bytes).ok()?;
    Some(bytes)
}
