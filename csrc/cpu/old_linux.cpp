// Keeps the library loadable where the compiler's own Linux is too new: on glibc 2.28 with the libstdc++ of its time
// (manylinux_2_28). Names that would ask for newer ones are defined here, for this library alone, by older ones.
// tests/package/test_packaging.py reads the library, and says when another has come.
#include <new>
#include <sstream>

#if defined(__GLIBC__) && defined(__GLIBCXX__)

// A function or variable of ours under the name that the other files' code asks for. Hidden, so that nobody else gets
// it.
#define PASS_EXT_HERE_AS(symbol) __asm__(symbol) __attribute__((visibility("hidden")))

// GLIBC_2.32. libstdc++ asks it whether a count of references may do without atomic operations: never.
extern char no_single_thread PASS_EXT_HERE_AS("__libc_single_threaded");
char no_single_thread = 0;

// GLIBC_2.29, which only leaves errno alone; the values are those of the version before.
#if defined(__x86_64__)
__asm__(".symver pass_ext_older_log,log@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver pass_ext_older_log,log@GLIBC_2.17");
#endif
#if defined(__x86_64__) || defined(__aarch64__)
extern "C" double pass_ext_older_log(double x);
double logarithm(double x) PASS_EXT_HERE_AS("log");
double logarithm(double x) { return pass_ext_older_log(x); }
#endif

// GLIBCXX_3.4.29
void throw_bad_length() PASS_EXT_HERE_AS("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_length() { throw std::bad_array_new_length(); }

// GLIBCXX_3.4.26: the constructors of string streams without arguments, by those with one.
void construct(std::ostringstream* stream)
    PASS_EXT_HERE_AS("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void construct(std::ostringstream* stream) { new (stream) std::ostringstream(std::ios_base::out); }

void construct(std::stringstream* stream)
    PASS_EXT_HERE_AS("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void construct(std::stringstream* stream) { new (stream) std::stringstream(std::ios_base::in | std::ios_base::out); }

#endif
