//! Fuzzes `skysail_fuzz::xds`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::xds(data));
