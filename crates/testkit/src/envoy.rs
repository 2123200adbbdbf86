//! A real Envoy.

use std::path::PathBuf;

/// Returns the Envoy of the variable `SKYSAIL_ENVOY`, or else the one that `test.sh` downloads to the cache.
///
/// # Panics
/// Panics if there is none.
pub fn envoy() -> PathBuf {
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).unwrap_or_default();
    let known = std::env::var_os("SKYSAIL_ENVOY").map(PathBuf::from);
    let path = known.unwrap_or_else(|| cache.join("skysail/envoy-1.40.0/envoy"));
    assert!(path.is_file(), "there is no Envoy at {}: run ./test.sh, which fetches it", path.display());
    path
}
