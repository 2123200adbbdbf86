//! Programs and files that `test.sh` fetches or builds.

use std::path::PathBuf;

/// Returns the path of a file that `test.sh` puts into the user's cache.
///
/// # Panics
/// Panics if it is not there.
pub fn cached(file: &str) -> PathBuf {
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).unwrap_or_default();
    let path = cache.join("skysail").join(file);
    assert!(path.is_file(), "there is no {}: run ./test.sh, which makes it", path.display());
    path
}

/// Returns a real Envoy: that of the variable `SKYSAIL_ENVOY`, or else the one in the user's cache.
///
/// # Panics
/// Panics if there is none.
pub fn envoy() -> PathBuf {
    let Some(known) = std::env::var_os("SKYSAIL_ENVOY").map(PathBuf::from) else {
        return cached("envoy-1.40.0/envoy");
    };
    assert!(known.is_file(), "SKYSAIL_ENVOY: there is no {}", known.display());
    known
}
