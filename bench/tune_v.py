import torch, triton, itertools, sys
from sdpa_router.kernels.int8_attention import quantize_value as qv
from sdpa_router.kernels.int8_attention.quantize import quantize
from sdpa_router.kernels.int8_attention.configs import HOPPER_GLUON
compile_only = len(sys.argv)>1
def med(f,n=12):
    fl=torch.empty(256*2**20,dtype=torch.int8,device="cuda"); ts=[]
    for _ in range(n):
        fl.zero_(); a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); a.record(); f(); b.record(); ts.append((a,b))
    torch.cuda.synchronize(); ts=[a.elapsed_time(b) for a,b in ts][2:]; ts.sort(); return ts[len(ts)//2]
H,N,D=56,33600,128
v=torch.randn(1,H,N,D,device="cuda").bfloat16()
y=torch.empty(1,H,D,264*128,dtype=torch.float8_e4m3fn,device="cuda"); sc=torch.empty(H,D,device="cuda"); pk=torch.empty(H*64*D,device="cuda")
for rows,warps,parts in itertools.product((32,64,128),(4,8),(8,16,32)):
    steps=triton.cdiv(N,128)*128//rows
    f=lambda: qv._value_peaks[(parts,H)](v,sc,pk,N,steps,H,1,*v.stride()[:3],0,0,D=D,DP=D,ROWS=rows,HAS_BIAS=False,num_warps=warps)
    f()
    if not compile_only: print("peaks",rows,warps,parts,round(med(f),4),flush=True)
for rows,warps,parts in itertools.product((64,128,256),(4,8,16),(8,32)):
    if rows*D//warps//32>128: continue
    steps=triton.cdiv(N,256)*256//rows
    f=lambda: qv._quantize_value[(steps,H)](v,sc,y,sc,pk,N,steps,H,1,*v.stride()[:3],0,0,D=D,DP=D,ROWS=rows,PARTS=parts,HAS_BIAS=False,PERMUTED=True,INTERPRETED=False,num_warps=warps)
    f()
    if not compile_only: print("quant",rows,warps,parts,round(med(f),4),flush=True)
if not compile_only:
    print("copy 482MB", round(med(lambda: v.clone()),4), "cast", round(med(lambda: v.to(torch.float8_e4m3fn)),4), "amax", round(med(lambda: v.amax(2)),4))
